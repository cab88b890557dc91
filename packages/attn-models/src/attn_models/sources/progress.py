"""Reports the progress of a fetch or a conversion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TextIO

from attn_schema.output import Verbosity, verbosity

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of a stage: `done` of `total` units; the stage ends when they are equal."""

    stage: str
    done: int
    total: int
    unit: Literal["bytes", "tensors", "tokens", "blocks"]


Report = Callable[[Step], None]
"""Called with every step, from the thread that does the work."""


def silent(step: Step) -> None:
    """A `Report` that prints nothing."""


@contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Report]:
    """A `Report` that draws bars on a terminal and prints plain lines anywhere else (standard error by default).

    With `--quiet` it prints nothing.
    """
    output = sys.stderr if stream is None else stream
    if verbosity() < Verbosity.NORMAL:
        yield silent
        return
    if not output.isatty():
        yield PlainLines(output).report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=output)) as bars:
        yield Bars(bars).report


class Bars:
    """Draws one progress bar for each stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def report(self, step: Step) -> None:
        """Move the bar of the step's stage."""
        if step.stage not in self._tasks:
            self._tasks[step.stage] = self._bars.add_task(step.stage, total=step.total)
        self._bars.update(self._tasks[step.stage], completed=step.done, total=step.total)


class PlainLines:
    """Prints a line at the beginning of a stage, and after each quarter of it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._quarters: dict[str, int] = {}

    def report(self, step: Step) -> None:
        """Print the step if it begins or completes a quarter."""
        quarter = 4 * step.done // step.total if step.total else 4
        if quarter > self._quarters.get(step.stage, -1):
            self._quarters[step.stage] = quarter
            print(f"{step.stage}: {25 * quarter} % of {_amount(step)}", file=self._stream, flush=True)


def _amount(step: Step) -> str:
    return f"{step.total / 1e6:.1f} MB" if step.unit == "bytes" else f"{step.total} {step.unit}"
