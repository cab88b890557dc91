"""Asking a loop to stop, from another thread."""

from __future__ import annotations

from enum import StrEnum


class Stop(StrEnum):
    """How to stop."""

    SAVE = "save"
    """Write a checkpoint first."""
    DISCARD = "discard"
    """At once."""


class StopFlag:
    """Set by any thread, read by the loop before every step."""

    def __init__(self) -> None:
        self._stop: Stop | None = None

    def set(self, stop: Stop) -> None:
        """Ask to stop; a later DISCARD overrules an earlier SAVE."""
        if self._stop is not Stop.DISCARD:
            self._stop = stop

    def get(self) -> Stop | None:
        """How to stop, or None to go on."""
        return self._stop
