"""A sweep over training options: all combinations of a grid, or random ones, trained as the runs of a comparison."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from attn_core.errors import InvalidValue, UnknownName, UserError
from attn_core.options import parse_options
from attn_schema.training import TrainingConfig, field_path

from attn_train.admission import check_config
from attn_train.comparison.plan import Question, Run, run_name, with_steps
from attn_train.data.load import load_dataset
from attn_train.model import resolved
from attn_train.pricing import step_price
from attn_train.tasks.base import Dataset

RANGE = ".."
FIXED = ("seed", "dataset", "prepared", "workers", "device")
"""Options that cannot vary: seeds have an option of their own, and losses on different data are not comparable."""


def parse_axes(given: Sequence[str]) -> dict[str, Any]:
    """Parse texts such as "learning_rate=1e-3,3e-3" into lists of values, by option.

    A range such as "learning_rate=1e-4..1e-2" becomes the tuple of its ends. Raises `InvalidValue` for a wrong format
    or no axes at all, and `UnknownName` for an unknown option.
    """
    known, axes = _options(), dict[str, Any]()
    for text in given:
        name, _, values = text.partition("=")
        if name not in known:
            raise UnknownName.of("option of training", name, known)
        if name in axes or not values:
            raise InvalidValue.of("--vary", text, "NAME=VALUE,VALUE,... or NAME=LOW..HIGH, each name once")
        axes[name] = _range(text, values) if RANGE in values else [_value(value) for value in values.split(",")]
    if not axes:
        raise InvalidValue.of("--vary", "", "at least one option with its values, such as learning_rate=1e-3,3e-3")
    return axes


def _options() -> list[str]:
    """Return the options that can vary: the fields of the configuration and of its parts."""
    parts = msgspec.structs.asdict(TrainingConfig())
    names = [name for name, part in parts.items() if not isinstance(part, msgspec.Struct)]
    names += [name for part in parts.values() if isinstance(part, msgspec.Struct) for name in part.__struct_fields__]
    return [name for name in names if name not in FIXED]


def _value(text: str) -> Any:
    return parse_options([f"value={text.strip()}"], "--vary")["value"]


def _range(text: str, values: str) -> tuple[float, float]:
    low, _, high = values.partition(RANGE)
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = (math.nan, math.nan)
    if not 0 < ends[0] < ends[1] < math.inf:
        raise InvalidValue.of("--vary", text, "LOW..HIGH with 0 < LOW < HIGH, drawn evenly on a logarithmic scale")
    return ends


def combinations(axes: Mapping[str, Any], samples: int | None, seed: int) -> list[dict[str, Any]]:
    """Return all combinations of values, or `samples` random ones drawn with `seed`.

    Samples of a grid have no duplicates. Raises `InvalidValue` for a range without `samples`.
    """
    ranges = [name for name, values in axes.items() if isinstance(values, tuple)]
    if samples is None and ranges:
        raise InvalidValue.of("--vary", ranges[0], "a range only with --samples, the number of values to draw")
    draw = random.Random(seed)
    if ranges:
        return [{name: _drawn(draw, values) for name, values in axes.items()} for _ in range(samples or 0)]
    grid = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return grid if samples is None else draw.sample(grid, min(samples, len(grid)))


def _drawn(draw: random.Random, values: Any) -> Any:
    if isinstance(values, tuple):
        return float(f"{math.exp(draw.uniform(math.log(values[0]), math.log(values[1]))):.4g}")
    return draw.choice(values)


def with_options(config: TrainingConfig, options: Mapping[str, Any]) -> TrainingConfig:
    """Return the configuration with these options; raises `InvalidValue` for invalid values or combinations."""
    plain = msgspec.to_builtins(config)
    for name, value in options.items():
        *parts, last = field_path(name).split(".")
        place = plain
        for part in parts:
            place = place[part]
        place[last] = value
    made: TrainingConfig = TrainingConfig.from_mapping(plain)
    return made


def planned_sweep(
    question: Question,
    chosen: Sequence[Mapping[str, Any]],
    home: Path,
    say: Callable[[str], None],
) -> list[Run]:
    """Return the runs of all combinations, validated as jobs are at submission.

    Raises the first error that is found, with the combination in its message.
    """
    runs: dict[tuple[int, int], Run] = {}
    datasets: dict[tuple[Any, ...], Dataset] = {}
    for number, options in enumerate(chosen):
        label = ",".join(f"{name}={value}" for name, value in options.items())
        try:
            config = resolved(with_options(question.config, options))
            check_config(config, home=home)
        except UserError as error:
            raise type(error)(f"{label}: {error.message}", **error.metadata) from error
        key = (config.data, config.model.max_seq_len)
        if key not in datasets:
            datasets[key] = load_dataset(config, home, say)
        price = step_price(config, datasets[key])
        config = with_steps(config, question, price, datasets[key])
        for seed in range(question.config.seed, question.config.seed + question.seeds):
            runs[seed, number] = Run(
                id=run_name([question.title, label], seed),
                label=label,
                size="",
                dataset=config.data.dataset,
                seed=seed,
                config=config.replace(seed=seed),
                price=price,
            )
    return [runs[key] for key in sorted(runs)]
