"""The final results of a recipe, by the mechanism in its blocks or by other fields of its model.

    python benchmarks/recipes.py vit-digits --seeds 3 --mechanism mha --mechanism linear
    python benchmarks/recipes.py tagging --data FOLDER --seeds 3 --field positions=every --field positions=depth

Each run is the same as `attn train --recipe NAME`, without a server. Reports the median, the lowest and the highest
over the seeds of the last validation loss and of the final metrics; all numbers are written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from attn_cli.recipe import located, recipe_under
from attn_core.options import parse_options
from attn_schema.flags import merged_values
from attn_schema.home import home_folder
from attn_schema.training import TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.model import resolved
from attn_train.records import StopFlag
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model

RESULTS = Path(__file__).parent / "results"
FINAL = ("validation_loss", "accuracy", "masked_accuracy", "answer_accuracy", "bleu")


class Last(NullReporter):
    """Keeps the newest value of each metric."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self.values |= values | {"step": step}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe")
    p.add_argument("--dataset", default="", help="where the data of the recipe are")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--mechanism", action="append", default=[], help="may be repeated")
    p.add_argument("--field", action="append", default=[], metavar="NAME=VALUE", help="of the model; may be repeated")
    p.add_argument("--out", type=Path)
    return p.parse_args()


def specification(args: argparse.Namespace, seed: int, **changes: Any) -> TrainingConfig:
    given = {"recipe": args.recipe, "dataset": located(args.dataset)}
    given |= {"steps": args.steps, "mechanism": changes.get("mechanism")}
    over: dict[str, Any] = {"seed": seed, "data": {}, "optimizer": {}, "model": changes}
    if args.dataset:
        over["data"]["dataset"] = given["dataset"]
    if args.steps is not None:
        over["optimizer"]["steps"] = args.steps
    return resolved(TrainingConfig.from_mapping(merged_values(recipe_under(given), over)))


def run(config: TrainingConfig) -> dict[str, float]:
    """Train to the end; returns the final metrics and the time taken."""
    dataset = load_dataset(config, home_folder(), print)
    last, began = Last(), time.perf_counter()
    trainer = Trainer(build_model(config, dataset), dataset, config)
    trainer.run(last, StopFlag())
    found = {name: last.values[name] for name in FINAL if name in last.values}
    return found | {"steps": last.values["step"], "training_s": trainer.elapsed, "s": time.perf_counter() - began}


def spread(values: list[float], digits: int) -> str:
    """The median with the lowest and highest value, as text."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    chosen: list[tuple[str, dict[str, Any]]] = [(name, {"mechanism": name}) for name in args.mechanism]
    chosen += [(field, dict(parse_options([field]))) for field in args.field]
    results: dict[str, list[dict[str, float]]] = {}
    for label, changes in chosen or [("as it is", {})]:
        runs = [run(specification(args, seed, **changes)) for seed in range(args.seeds)]
        results[label] = runs
        final = ", ".join(
            f"{name} {spread([one[name] for one in runs], 3)}" for name in (*FINAL, "training_s") if name in runs[0]
        )
        print(f"{args.recipe}, {label}: {final}", flush=True)
    out = args.out or RESULTS / f"recipes-{args.recipe}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    said = {"benchmark": "recipes", "recipe": args.recipe, "threads": args.threads, "torch": torch.__version__}
    out.write_text(json.dumps(said | {"runs": results}, indent=2) + "\n")
    print(out)


if __name__ == "__main__":
    main()
