"""When a watch whose connection broke tries again, and where it goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from attn_core.errors import AttnError, Unavailable
from attn_schema.training import JobEvent, TrainingJob

FIRST_WAIT = 0.2
LONGEST_WAIT = 5.0
"""Seconds between attempts: the first, doubled up to the longest."""


@dataclass
class WatchState:
    """Where a watch is. After a break it goes on behind the last event seen, for at most `patience` seconds."""

    after: int
    patience: float
    connected: bool = False
    _failing_since: float | None = None
    _wait: float = field(default=FIRST_WAIT)

    def accept(self, update: TrainingJob | JobEvent | None) -> TrainingJob | JobEvent | None:
        """Note an update; returns what the caller has not seen yet, or None."""
        if isinstance(update, TrainingJob):
            # Every stream begins with the job; only the first is news, and none is progress.
            fresh, self.connected = not self.connected, True
            return update if fresh else None
        self._failing_since, self._wait = None, FIRST_WAIT
        if update is None or update.id <= self.after:
            return None
        self.after = update.id
        return update

    def wait_after(self, error: AttnError) -> float:
        """Seconds to wait before the next attempt; raises `error` if there shall be none."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if not (self.connected and isinstance(error, Unavailable)) or now - self._failing_since > self.patience:
            raise error
        wait, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        return wait
