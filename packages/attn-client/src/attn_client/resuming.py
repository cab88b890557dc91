"""When a call whose connection broke tries again, and where it goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import AttnError, Unavailable
from attn_schema import GenerateRequest, OutputDelta, Prompt, PromptLike, SamplingParams
from attn_schema.resuming import StreamProgress, seeded
from attn_schema.training import JobEvent, TrainingJob

from attn_client.errors import NoServer
from attn_client.operations import Operation, inference
from attn_client.settings import ClientSettings

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


class GenerateState:
    """Where a generation is. After a break it goes on behind the tokens received, for a minute without a new one.

    A server that never answered is asked once at each address. Raises `InvalidValue` for what is no prompt.
    """

    PATIENCE = 60.0

    def __init__(
        self,
        settings: ClientSettings,
        model: str,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        timeout: float | None,
    ) -> None:
        params = seeded(sampling or SamplingParams())
        self._request = GenerateRequest(model=model, prompt=Prompt.of(prompt), sampling=params)
        self._progress = StreamProgress(None, settings.timeout if timeout is None else timeout, self.PATIENCE)
        self._others = len(settings.addresses) - 1

    def operation(self) -> Operation[Any, OutputDelta]:
        """What to ask now."""
        return inference.generate(self._request.replace(resume=self._progress.resume))

    def remaining(self) -> float | None:
        """Seconds until the deadline, None without one; raises `DeadlineExceeded` when it is over."""
        return self._progress.remaining()

    def take(self, delta: OutputDelta) -> OutputDelta:
        """Note a delta, and return it for the caller."""
        return self._progress.take(delta)

    def wait_after(self, error: Unavailable) -> float:
        """Seconds to wait before asking again; raises `error` if that shall not be."""
        if error.metadata.get("code") == "CANCELLED":
            raise error
        if self._progress.begun:
            return self._progress.wait_after(error, accepted=not isinstance(error, NoServer))
        if self._others <= 0:
            raise error
        self._others -= 1
        return 0.0
