"""How much sooner is an update made when linear layers multiply in bfloat16?

Recipes and a decoder of Shakespeare's characters make the same updates in each precision, in turns, so that what else
the machine does falls on both. Reported are target tokens by second of processor in the best of the turns, for what
disturbs only slows. Run:

    python benchmarks/training_precision.py --data FOLDER
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from attn_client.recipe import read_recipe
from attn_schema.home import home_folder
from attn_train.data.load import load_dataset
from attn_train.optimizer import PRECISIONS
from attn_train.process import keep_freed_memory
from attn_train.records import Stop, StopFlag
from attn_train.spec import CheckpointSpec, DataSpec, ModelSpec, OptimizerSpec, TrainingSpec
from attn_train.spec_messages import spec_of
from attn_train.tasks.base import Dataset, TrainingTask
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model
from report import write_report

RECIPES = ("multi30k", "multi30k-rnnsearch")
WIDTHS = (128, 384)
"""Of decoders with 4 blocks."""
UPDATES, TURNS = 4, 3
SELDOM = CheckpointSpec(metrics_interval=UPDATES, evaluation_interval=10**9)


def specifications(folder: Path) -> Iterator[tuple[str, TrainingSpec]]:
    """What is trained, by name."""
    for name in RECIPES:
        message = read_recipe(name)
        message.data.path = str(folder.absolute())
        message.data.most_pairs = 6000
        yield name, spec_of(message)
    optimizer = OptimizerSpec(steps=1000, batch=12, learning_rate=1e-3, min_learning_rate=1e-4)
    for width in WIDTHS:
        model = ModelSpec(
            hidden_size=width, num_layers=4, num_heads=4, max_seq_len=128, mechanism="mha", positions="rotary"
        )
        spec = TrainingSpec(model=model, data=DataSpec(name="shakespeare"), optimizer=optimizer)
        yield f"shakespeare, width {width}", spec


class Repeated:
    """Lessons whose first batches come again and again, as new shapes cost the time of compiling for them."""

    def __init__(self, task: TrainingTask) -> None:
        self._batches = cycle([task.next_batch() for _ in range(UPDATES)])
        self.tokens = task.tokens
        self.generator = task.generator
        self.loss = task.loss
        self.validation_loss = task.validation_loss
        self.final_metrics = task.final_metrics

    def next_batch(self) -> tuple[torch.Tensor, ...]:
        """The next of them."""
        return next(self._batches)


class FewBatches:
    """Material of which only some batches are learned."""

    def __init__(self, dataset: Dataset) -> None:
        self._material = dataset
        self.tokenizer, self.sizes = dataset.tokenizer, dataset.sizes

    def task(self, spec: TrainingSpec) -> Repeated:
        """The same for the same seed."""
        return Repeated(self._material.task(spec))


class UntilMetrics(NullReporter):
    """Stops a run at its next metrics."""

    def __init__(self) -> None:
        self.flag = StopFlag()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - as loops tell
        """Now."""
        self.flag.set(Stop.DISCARD)


def rates(spec: TrainingSpec, dataset: Dataset) -> dict[str, float]:
    """Target tokens a second of processor, by precision."""
    chosen = {precision: replace(spec, precision=precision, checkpoint=SELDOM) for precision in PRECISIONS}
    text = FewBatches(dataset)
    trainers = {name: Trainer(build_model(each, text), text, each) for name, each in chosen.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(1 + TURNS):
        for name, trainer in trainers.items():
            seconds[name].append(updates(trainer))
    tokens = text.task(spec).tokens
    return {name: round(tokens / min(turns[1:])) for name, turns in seconds.items()}


def updates(trainer: Trainer) -> float:
    """The seconds of processor that some updates take."""
    report, began = UntilMetrics(), time.process_time()
    trainer.run(report, report.flag)
    return time.process_time() - began


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each specification."""
    for name, spec in specifications(folder):
        text = load_dataset(spec, home_folder(), print)
        found = rates(spec, text)
        yield {"trained": name, "tokens_per_second": found, "ratio": round(found["bfloat16"] / found["float32"], 2)}


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    facts = {"question": "tokens by second of processor in each precision", "threads": args.threads}
    write_report("training-precision", facts, rows(args.data), args.out)


if __name__ == "__main__":
    main()
