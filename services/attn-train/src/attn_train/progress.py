"""The progress of a run as a bar on one line, which terminals and notebooks draw again in place."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from attn_schema.output import significant

from attn_train.records import NullReporter

WIDTH = 30
"""The length of the bar, in characters."""
SHOWN = ("loss", "validation_loss")
"""The metrics beside the bar, each with its newest value."""


class ProgressReporter(NullReporter):
    """Draws how many of `steps` updates are done, the newest losses, and the seconds that the rest will take.

    `stream` is standard output by default. Log lines are printed above the bar.
    """

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._steps = steps
        self._stream = sys.stdout if stream is None else stream
        self._began: tuple[float, int] | None = None
        self._values: dict[str, float] = {}
        self._line = ""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Draw the bar again."""
        self._values |= {name: values[name] for name in SHOWN if name in values}
        self._began = self._began or (time.monotonic(), step)
        seconds, done = time.monotonic() - self._began[0], step - self._began[1]
        left = f"{seconds / done * (self._steps - step):.0f} s left" if done and step < self._steps else ""
        bar = "█" * (WIDTH * step // self._steps)
        found = "  ".join(f"{name.replace('_', ' ')} {significant(value)}" for name, value in self._values.items())
        self._draw(f"{bar:░<{WIDTH}} {step}/{self._steps}  {found}  {left}".rstrip(), end=step >= self._steps)

    def log(self, text: str) -> None:
        """Print a line above the bar."""
        line, self._line = self._line, ""
        self._stream.write(f"\r{text:<{len(line)}}\n")
        self._draw(line, end=False)

    def _draw(self, line: str, *, end: bool) -> None:
        self._stream.write(f"\r{line:<{len(self._line)}}" + ("\n" if end else ""))
        self._stream.flush()
        self._line = "" if end else line
