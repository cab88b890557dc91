"""How much faster is training when linear layers multiply in bfloat16?

Recipes and a decoder on Shakespeare's characters make the same updates in each precision, in turns, so that other load
affects both. Reports the target tokens per processor second in the best turn, since disturbances only slow a turn.
Run:

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
from attn_cli.recipe import read_recipe
from attn_schema.home import home_folder
from attn_schema.training import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.process_tuning import keep_freed_memory
from attn_train.records import Stop, StopFlag
from attn_train.tasks.base import Dataset, TrainingTask
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model
from report import write_report

RECIPES = ("multi30k", "multi30k-rnnsearch")
WIDTHS = (128, 384)
"""The widths of the decoders, which have 4 blocks."""
UPDATES, TURNS = 4, 3
SELDOM = EvaluationConfig(logging_steps=UPDATES, eval_steps=10**9)


def specifications(folder: Path) -> Iterator[tuple[str, TrainingConfig]]:
    """The configurations that are trained, with their names."""
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
    """A task that repeats its first batches, so that no time is spent on compiling kernels for new shapes."""

    def __init__(self, task: TrainingTask) -> None:
        self._batches = cycle([task.next_batch() for _ in range(UPDATES)])
        self.tokens = task.tokens
        self.generator = task.generator
        self.loss = task.loss
        self.validation_loss = task.validation_loss
        self.final_metrics = task.final_metrics

    def next_batch(self) -> tuple[torch.Tensor, ...]:
        """The next batch."""
        return next(self._batches)


class FewBatches:
    """A dataset whose task repeats a few batches; see `Repeated`."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.model_fields, self.summary, self.save = dataset.model_fields, dataset.summary, dataset.save

    def task(self, config: TrainingConfig) -> Repeated:
        """The task of the dataset with repeated batches; the same for equal seeds."""
        return Repeated(self._dataset.task(config))


class UntilMetrics(NullReporter):
    """Stops a run at its next metrics."""

    def __init__(self) -> None:
        self.flag = StopFlag()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:  # noqa: ARG002 - as loops tell
        """Stop the run."""
        self.flag.set(Stop.DISCARD)


def rates(config: TrainingConfig, dataset: Dataset) -> dict[str, float]:
    """The target tokens per processor second, by precision."""
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
    """The processor seconds of some updates."""
    report, began = UntilMetrics(), time.process_time()
    trainer.run(report, report.flag)
    return time.process_time() - began


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """One row for each configuration."""
    for name, config in specifications(folder):
        text = load_dataset(config, home_folder(), print)
        found = rates(config, text)
        yield {"trained": name, "tokens_per_second": found, "ratio": round(found["bfloat16"] / found["float32"], 2)}


def main() -> None:
    """Run the benchmark and write the report."""
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
