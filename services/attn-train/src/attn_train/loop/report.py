"""What a loop tells whoever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Report(Protocol):
    """Receives what happens in a run, in order, on the loop's thread; must return quickly."""

    def working(self) -> None:
        """An update or a batch of an evaluation was done."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Values measured when `step` updates were done, by name."""
        ...

    def checkpoint(self, step: int, path: Path, size: int) -> None:
        """The folder `path` of `size` bytes holds a complete checkpoint."""
        ...

    def log(self, text: str) -> None:
        """A line for people."""
        ...

    def flush(self) -> None:
        """Return when all of the above has arrived: called before a checkpoint makes it history."""
        ...


class Silence:
    """A report that nobody reads."""

    def working(self) -> None:
        """Nothing."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def checkpoint(self, step: int, path: Path, size: int) -> None:
        """Nothing."""

    def log(self, text: str) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""
