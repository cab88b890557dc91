"""Curves of training runs, ours or stored by others, drawn beside each other in characters."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from attn_core.errors import InvalidValue
from attn_schema.output import significant
from attn_schema.text_files import lines_of, read_text

FIELD = "--beside"
FORMS = {
    ".json": "the log_history of transformers' trainer_state.json",
    ".jsonl": "lines of JSON, as in a job's metrics.jsonl",
    ".csv": "a table with column names",
}
"""Files of curves by suffix."""
THEIRS = {"validation_loss": "eval_loss", "gradient_norm": "grad_norm"}
"""The names that transformers has for metrics."""
MARKS = "●×○+△□◇*"
"""The marks of curves, in order."""
SEVERAL = "▒"
"""The mark where several curves meet."""

LARGEST = 1e300
"""The largest value that is drawn; sums of many are still finite."""


class Curve(NamedTuple):
    """The values of a metric by step, with the name of the run; those that are not finite are left out."""

    name: str
    points: Sequence[tuple[int, float]]


def curve_of(name: str, metric: str, rows: Sequence[Mapping[str, Any]], field: str) -> Curve:
    """Return the curve of rows with a `step` and, in some of them, the metric by our name or that of transformers.

    Raises `InvalidValue` with the `field` if no row has it, or for a step or a value that is no number.
    """
    names = [metric, *([THEIRS[metric]] if metric in THEIRS else [])]
    known = next((each for each in names if any(each in row for row in rows)), None)
    if known is None:
        found = ", ".join(sorted({str(key) for row in rows for key in row})) or "nothing"
        raise InvalidValue.of(field, f"{name} with {found}", f"a run with {' or '.join(names)}; --metric names another")
    given = [(row.get("step"), row[known]) for row in rows if row.get(known) not in (None, "")]
    try:
        points = [(int(str(step)), float(value)) for step, value in given]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValue.of(field, name, f"a whole number as step and a number as {known} ({error})") from error
    finite = [(step, value) for step, value in points if abs(value) <= LARGEST]
    if not finite:
        raise InvalidValue.of(field, name, f"at least one {known} that is finite")
    return Curve(name, finite)


def read_curve(path: Path, metric: str) -> Curve:
    """Return the curve in a file; raises `InvalidValue` for one that is not of `FORMS`, and as `curve_of` does."""
    allowed = "; ".join(f"{suffix}, {form}" for suffix, form in FORMS.items())
    if path.suffix.lower() not in FORMS:
        raise InvalidValue.of(FIELD, str(path), allowed)
    try:
        rows = _rows(path.suffix.lower(), read_text(path, FIELD))
    except (ValueError, TypeError, KeyError, RecursionError, csv.Error) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue.of(FIELD, str(path), f"{allowed} ({type(error).__name__}: {error})") from error
    return curve_of(str(path), metric, rows, FIELD)


def _rows(suffix: str, text: str) -> list[dict[str, Any]]:
    if suffix == ".csv":
        return list(csv.DictReader(lines_of(text), skipinitialspace=True, strict=True))
    if suffix == ".json":
        found = json.loads(text)["log_history"]
    else:
        found = [json.loads(line) for line in lines_of(text) if line.strip()]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise TypeError("not a list of objects")
    return found


def drawn(curves: Sequence[Curve], width: int, height: int) -> str:
    """The curves in `height` rows of `width` characters, with axes and the last value of each; steps that share a
    column are averaged."""
    steps = [step for curve in curves for step, _ in curve.points]
    columns = [_columns(curve, min(steps), max(steps), width) for curve in curves]
    values = [value for found in columns for value in found.values()]
    low, high = min(values), max(values)
    cells = [[" "] * width for _ in range(height)]
    for number, found in enumerate(columns):
        for column, value in found.items():
            row = round((high - value) / (high - low or 1.0) * (height - 1))
            cells[row][column] = MARKS[number % len(MARKS)] if cells[row][column] == " " else SEVERAL
    ends = {0: significant(high), height - 1: significant(low)}
    margin = max(map(len, ends.values()))
    lines = [f"{ends.get(row, ''):>{margin}} │{''.join(line).rstrip()}" for row, line in enumerate(cells)]
    between = max(1, width - len(str(min(steps))) - len(str(max(steps))))
    lines += [f"{'':{margin}} └{'─' * width}", f"{'':{margin}}  {min(steps)}{'':{between}}{max(steps)}"]
    for number, curve in enumerate(curves):
        step, value = curve.points[-1]
        lines.append(f"{MARKS[number % len(MARKS)]} {curve.name}: {significant(value)} at step {step}")
    return "\n".join(lines)


def _columns(curve: Curve, first: int, last: int, width: int) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for step, value in curve.points:
        found.setdefault(round((step - first) / max(1, last - first) * (width - 1)), []).append(value)
    return {column: fmean(values) for column, values in found.items()}
