"""How fast does a model learn with a recipe?

Trains a recipe as a job would, in this process, and records the validation loss, in nats per token, by processor
seconds; losses are comparable between recipes with the same tokens. The finished model is saved in the home folder
(ATTN_HOME), where `attn translate --model NAME` and `attn generate --model NAME` find it. A run that was stopped
continues from its newest checkpoint. Run:

    python benchmarks/recipe_curve.py multi30k --data FOLDER
    python benchmarks/recipe_curve.py key-value
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import msgspec
from attn_cli.recipe import read_recipe
from attn_schema.home import home_folder
from attn_schema.training import LogLine, Metrics, TrainingConfig
from attn_train.attempt import Assignment, Message
from attn_train.model import resolved
from attn_train.process_tuning import keep_freed_memory
from attn_train.records import StopFlag
from attn_train.settings import Layout
from attn_train.worker import work
from report import machine


def specification(recipe: str, data: Path | None, steps: int | None, precision: str | None) -> TrainingConfig:
    """The recipe's configuration, with the pairs in the folder `data` if one is given."""
    config = read_recipe(recipe)
    if data is not None:
        config = config.replace(data=config.data.replace(dataset=str(data.absolute())))
    optimizer = config.optimizer.replace(steps=steps or config.optimizer.steps)
    return resolved(config.replace(optimizer=optimizer, precision=precision or config.precision))


class Curve:
    """The losses by processor seconds, in a file with one line per measurement, to which a later process appends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        self._before = self.rows[-1]["processor_seconds"] if self.rows else 0.0

    def hear(self, message: Message) -> None:
        """Record and print validation metrics; print log lines."""
        if isinstance(message, LogLine):
            print(message.text, flush=True)
        if not isinstance(message, Metrics) or "validation_loss" not in message.values:
            return
        seconds = self._before + time.process_time()
        self.rows.append({"step": message.step, "processor_seconds": round(seconds, 1), **message.values})
        line = json.dumps(self.rows[-1])
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def main() -> None:
    """Train one recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path, help="folder with train.en, train.de and so on, for recipes that need one")
    parser.add_argument("--name", help="of the job and the model; by default the recipe's")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--precision", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keep_freed_memory()
    home, name = home_folder(), args.name or args.recipe
    config = specification(args.recipe, args.data, args.steps, args.precision)
    folder = Layout(home).job(name)
    folder.mkdir(parents=True, exist_ok=True)
    curve = Curve(folder / "curve.jsonl")
    given = Assignment(job_id=name, attempt=1, config=config, home=home, threads=args.threads)
    print(work(given, curve.hear, StopFlag()))
    if args.out is not None:
        report = {"config": msgspec.to_builtins(config), "machine": machine(), "rows": curve.rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
