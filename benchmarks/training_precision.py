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
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from attn_client.recipe import read_recipe
from attn_schema.home import home_folder
from attn_schema.training import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.process import keep_freed_memory
from attn_train.records import Stop, StopFlag
from attn_train.tasks.base import Dataset, TrainingTask
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model
from report import write_report

RECIPES = ("multi30k", "multi30k-rnnsearch")
WIDTHS = (128, 384)
"""Of decoders with 4 blocks."""
UPDATES, TURNS = 4, 3
SELDOM = EvaluationConfig(logging_steps=UPDATES, eval_steps=10**9)


def specifications(folder: Path) -> Iterator[tuple[str, TrainingConfig]]:
    """What is trained, by name."""
    for name in RECIPES:
        config = read_recipe(name)
        yield name, config.replace(data=config.data.replace(dataset=str(folder.absolute()), max_pairs=6000))
    optimizer = OptimizerConfig(steps=1000, batch_size=12, learning_rate=1e-3, min_learning_rate=1e-4)
    for width in WIDTHS:
        model = ModelConfig(hidden_size=width, num_layers=4, num_heads=4, max_seq_len=128, positions="rotary")
        model = model.with_defaults()
        config = TrainingConfig(model=model, data=DataConfig(dataset="shakespeare"), optimizer=optimizer)
        yield f"shakespeare, width {width}", config


class Repeated:
    """A task whose first batches come again and again, as new shapes cost the time of compiling for them."""

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
    """A dataset of which only some batches are learned."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.model_fields, self.summary, self.save = dataset.model_fields, dataset.summary, dataset.save

    def task(self, config: TrainingConfig) -> Repeated:
        """The same for the same seed."""
        return Repeated(self._dataset.task(config))


class UntilMetrics(NullReporter):
    """Stops a run at its next metrics."""

    def __init__(self) -> None:
        self.flag = StopFlag()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - as loops tell
        """Now."""
        self.flag.set(Stop.DISCARD)


def rates(config: TrainingConfig, dataset: Dataset) -> dict[str, float]:
    """Target tokens a second of processor, by precision."""
    chosen = {
        precision: config.replace(precision=precision, evaluation=SELDOM) for precision in ("float32", "bfloat16")
    }
    text = FewBatches(dataset)
    trainers = {name: Trainer(build_model(each, text), text, each) for name, each in chosen.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(1 + TURNS):
        for name, trainer in trainers.items():
            seconds[name].append(updates(trainer))
    tokens = text.task(config).tokens
    return {name: round(tokens / min(turns[1:])) for name, turns in seconds.items()}


def updates(trainer: Trainer) -> float:
    """The seconds of processor that some updates take."""
    report, began = UntilMetrics(), time.process_time()
    trainer.run(report, report.flag)
    return time.process_time() - began


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each specification."""
    for name, config in specifications(folder):
        text = load_dataset(config, home_folder(), print)
        found = rates(config, text)
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
