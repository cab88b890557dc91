"""The settings and results of experiments: a table, curves, and a verdict with the numbers that support it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from attn_core.errors import InvalidValue
from attn_schema.json_text import json_text
from attn_schema.output import snake_case

Verdict: TypeAlias = Literal["holds", "holds in part", "does not hold", "not measured"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Points: TypeAlias = Sequence[tuple[float, float]]
BARS = " ▁▂▃▄▅▆▇█"


def quiet(words: str) -> None:
    """Ignore a progress message."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The size of an experiment.

    `seeds` is the number of runs of each kind, with seeds from `first_seed`; `share`, above 0, is the fraction of the
    usual steps or samples: less is faster and less certain. `say` is called with progress messages, one line each.
    """

    seeds: int = 3
    first_seed: int = 0
    share: float = 1.0
    say: Callable[[str], None] = quiet

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InvalidValue.of("seeds", self.seeds, "a whole number from 1")
        if not 0 < self.share <= 10:
            raise InvalidValue.of("share", self.share, "a number above 0, at most 10")

    @property
    def runs(self) -> range:
        """The seed of each run."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def steps(self, usual: int) -> int:
        """`share` times the usual number of steps, at least 1."""
        return max(1, round(self.share * usual))


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves by name, each a sequence of points (x, y); `logarithmic` axes for power laws."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    logarithmic: bool = False


@dataclass(frozen=True, kw_only=True)
class Result:
    """An experiment's result: the table `rows` (with the same keys), the verdict, and `because`, the numbers behind it.

    `drawings` are further pictures by name, as functions that write a picture to a path.
    """

    rows: Sequence[Mapping[str, Any]]
    verdict: Verdict
    because: str
    curves: Curves | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    drawings: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise InvalidValue.of("verdict", self.verdict, ", ".join(VERDICTS))


def judged(*, all_of: Mapping[str, bool]) -> tuple[Verdict, str]:
    """The verdict: `holds` if every statement is true, `does not hold` if none is, else in part; and the statements."""
    true = [words for words, found in all_of.items() if found]
    false = [words for words, found in all_of.items() if not found]
    verdict: Verdict = "holds" if not false else "does not hold" if not true else "holds in part"
    said = [f"true: {'; '.join(true)}"] if true else []
    return verdict, ". ".join([*said, f"false: {'; '.join(false)}"] if false else said)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median of the values, with the lowest and highest in brackets; a single value alone."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    if len(ordered) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"


def as_text(curves: Curves) -> str:
    """The curves as text, one line each, on one scale from the lowest to the highest value of all."""
    values = [y for points in curves.lines.values() for _, y in points]
    low, high = min(values), max(values)
    width = max(map(len, curves.lines))
    lines = [f"{curves.title}: {curves.y} ({low:.3g} to {high:.3g}) by {curves.x}"]

    def height(value: float) -> float:
        if curves.logarithmic and low > 0:
            return math.log(value / low) / (math.log(high / low) or 1.0)
        return (value - low) / (high - low or 1.0)

    for name, points in curves.lines.items():
        bars = "".join(BARS[1 + round((len(BARS) - 2) * height(y))] for _, y in points)
        lines.append(f"{name:<{width}}  {bars}  {points[0][1]:.3g} → {points[-1][1]:.3g}")
    return "\n".join(lines)


def draw(curves: Curves, path: Path) -> None:
    """Write the curves as a picture: PNG, SVG or PDF. Raises `InvalidValue` for a path that cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
    if curves.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.set_xlabel(curves.x)
    axes.set_ylabel(curves.y)
    axes.set_title(curves.title, fontsize="small", wrap=True)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    write(figure, path)


def write(figure: Any, path: Path) -> None:
    """Write a figure; raises `InvalidValue` for a path that cannot be written or an unknown format."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise InvalidValue.of("--out", str(path), f"a file that can be written ({error})") from error


def plain(result: Result) -> dict[str, Any]:
    """A result as values for JSON: rows with keys in snake_case, without drawings."""
    found = asdict(replace(result, drawings={}))
    rows = [{snake_case(heading): value for heading, value in row.items()} for row in found["rows"]]
    return {name: value for name, value in found.items() if name != "drawings"} | {"rows": rows}


def save(result: Result, name: str, folder: Path) -> list[Path]:
    """Write `name`.json and its pictures into a folder, creating it if needed; returns the paths written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json_text(plain(result), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise InvalidValue.of("--out", str(folder), f"a folder that can be written ({error})") from error
    written = [folder / f"{name}.json"]
    if result.curves is not None:
        draw(result.curves, folder / f"{name}.png")
        written.append(folder / f"{name}.png")
    for what, drawing in result.drawings.items():
        drawing(folder / f"{name}-{what}.png")
        written.append(folder / f"{name}-{what}.png")
    return written
