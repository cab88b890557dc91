"""How well does a small character-level decoder learn Shakespeare with each causal attention mechanism?

A character model of width 64 with 2 blocks, 4 heads and a context of 128 is trained for the same steps with every
installed mechanism that supports causal self-attention, with default options and rotary positions, or learned ones if
it does not support rotary. Reports the validation loss, in nats per character, during training; for a mechanism that
does not run, the reason. Run:

    python benchmarks/shakespeare.py                            # all of them, one seed
    python benchmarks/shakespeare.py --seeds 3 --mechanism mha  # one of them, or some
    python benchmarks/shakespeare.py --table FILE...            # the table of results that are there
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attn_core import Capability, installed
from attn_core.errors import AttnError
from attn_schema.home import home_folder
from attn_schema.training import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_text
from attn_train.model import resolved
from attn_train.process_tuning import keep_freed_memory
from attn_train.records import StopFlag
from attn_train.tasks.language_modeling import TextDataset
from attn_train.trainer import NullReporter, Trainer, TrainingDiverged
from attn_train.worker import build_model
from report import write_report

FEWER_HEADS = {"gqa": 2, "mqa": 1}
"""The number of key/value heads for the mechanisms that are defined by having fewer."""
MEASURED = 20
"""The number of validation batches in each measurement."""
LEARNED = 3.0
"""The loss, in nats per character, below which a model has learned something: character frequencies alone give 3.3."""


def fitting() -> list[str]:
    """The names of the mechanisms that can be used in a decoder."""
    return [m.name for m in installed().mechanisms if m.can(Capability.CAUSAL)]


def specification(mechanism: str, seed: int, steps: int) -> TrainingConfig:
    """The configuration of a run, which is the same for all mechanisms except for positions and key/value heads."""
    return resolved(
        TrainingConfig(
            model=ModelConfig(
                hidden_size=64,
                num_layers=2,
                num_heads=4,
                num_kv_heads=FEWER_HEADS.get(mechanism),
                max_seq_len=128,
                mechanism=mechanism,
            ),
            data=DataConfig(dataset="shakespeare"),
            optimizer=OptimizerConfig(steps=steps, batch_size=8, learning_rate=3e-3, warmup_steps=steps // 10),
            evaluation=EvaluationConfig(eval_steps=max(1, steps // 5), eval_batches=MEASURED),
            seed=seed,
        )
    )


class Losses(NullReporter):
    """Records the validation losses by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record the validation loss of a step, if there is one."""
        if "validation_loss" in values:
            self.by_step[step] = round(values["validation_loss"], 4)


def run(mechanism: str, seed: int, steps: int, text: TextDataset) -> dict[str, Any]:
    """Train one model and return its row; an error is recorded as `failed`."""
    row: dict[str, Any] = {"mechanism": mechanism, "seed": seed}
    began, losses = time.process_time(), Losses()
    try:
        config = specification(mechanism, seed, steps)
        model = build_model(config, text)
        row["positions"] = config.model.positions
        row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        Trainer(model, text, config).run(losses, StopFlag())
    except (AttnError, TrainingDiverged, RuntimeError) as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    return row | {"losses": losses.by_step, "processor_seconds": round(time.process_time() - began, 1)}


def rows(mechanisms: Iterable[str], seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """One row for each mechanism and seed."""
    text = load_text(DataConfig(dataset="shakespeare"), home_folder(), print)
    for mechanism in mechanisms:
        for seed in range(seeds):
            yield run(mechanism, seed, steps, text)


def table(found: Iterable[Mapping[str, Any]]) -> str:
    """The table of final losses, lowest first: the median and range over the seeds; then the runs that failed."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in found:
        by_name.setdefault(row["mechanism"], []).append(row)
    done = {name: [row for row in own if "failed" not in row] for name, own in by_name.items()}
    last = {name: [list(row["losses"].values())[-1] for row in own] for name, own in done.items() if own}
    lines = ["| mechanism | positions | parameters | validation loss | seeds | processor, s |", "|---" * 6 + "|"]
    for name, losses in sorted(last.items(), key=lambda item: statistics.median(item[1])):
        own, middle = done[name], statistics.median(losses)
        spread = f" ({min(losses):.3f}-{max(losses):.3f})" if len(losses) > 1 else ""
        remark = "" if middle < LEARNED else ", learned next to nothing"
        seconds = statistics.median(row["processor_seconds"] for row in own)
        cells = [name, own[0]["positions"], own[0]["parameters"], f"{middle:.3f}{spread}{remark}", len(own)]
        lines.append("| " + " | ".join(map(str, [*cells, f"{seconds:.0f}"])) + " |")
    failed = [f"- `{name}`: {own[0]['failed']}" for name, own in by_name.items() if not done[name]]
    return "\n".join([*lines, "", *failed])


def main() -> None:
    """Train the selected mechanisms, or print the table of existing results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", choices=fitting(), action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    if args.table:
        print(table(row for path in args.table for row in json.loads(path.read_text("utf-8"))["rows"]))
        return
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    facts = {"question": "validation loss by mechanism", "steps": args.steps, "seeds": args.seeds}
    chosen = args.mechanism or fitting()
    write_report("learning-shakespeare", facts, rows(chosen, args.seeds, args.steps), args.out)


if __name__ == "__main__":
    main()
