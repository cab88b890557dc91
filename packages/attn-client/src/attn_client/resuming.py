"""Retries of streaming calls whose connection broke, and the point from which they continue."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from attn_core.errors import AttnError, Unavailable
from attn_schema import GenerateRequest, OutputDelta, Prompt, PromptLike, SamplingParams
from attn_schema.methods import WatchTrainingJobRequest, WatchTrainingJobResponse
from attn_schema.resuming import StreamProgress, seeded
from attn_schema.training import JobEvent, TrainingJob

from attn_client.errors import NoServer
from attn_client.settings import ClientSettings

FIRST_WAIT = 0.2
LONGEST_WAIT = 5.0
"""The longest wait between attempts, in seconds; the first is `FIRST_WAIT`, doubled each time up to this."""


@dataclass
class WatchState:
    """The progress of `watch`. After a break it continues after the last event, retrying for `patience` seconds."""

    job_id: str
    after: int
    patience: float
    connected: bool = False
    _failing_since: float | None = None
    _wait: float = field(default=FIRST_WAIT)

    def request(self) -> WatchTrainingJobRequest:
        """The next call to make."""
        return WatchTrainingJobRequest(id=self.job_id, after_event_id=self.after)

    def accept(self, update: WatchTrainingJobResponse) -> TrainingJob | JobEvent | None:
        """Record an update; returns the job or the event that is new to the caller, else None."""
        if update.job is not None:
            # Every stream begins with the job; only the first is new to the caller, and none counts as progress.
            fresh, self.connected = not self.connected, True
            return update.job if fresh else None
        self._failing_since, self._wait = None, FIRST_WAIT
        event = update.event
        if event is None or event.id <= self.after:
            return None
        self.after = event.id
        return event

    def wait_after(self, error: AttnError) -> float:
        """Seconds to wait before the next attempt; raises `error` if it is not to be retried."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if not (self.connected and isinstance(error, Unavailable)) or now - self._failing_since > self.patience:
            raise error
        wait, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        return wait


class GenerateState:
    """The progress of `generate`. After a break it continues after the received tokens; see `StreamProgress`.

    Retries end after a minute (`PATIENCE`) without a new token; until a first response arrives, each address is tried
    once. Raises `InvalidValue` for an invalid prompt.
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

    def request(self) -> GenerateRequest:
        """The next call to make: the request with what has been received so far."""
        return self._request.replace(resume=self._progress.resume)

    def remaining(self) -> float | None:
        """Seconds until the deadline, or None without one; raises `DeadlineExceeded` if it has passed."""
        return self._progress.remaining()

    def take(self, delta: OutputDelta) -> OutputDelta:
        """Record a delta and return it."""
        return self._progress.take(delta)

    def wait_after(self, error: Unavailable) -> float:
        """Seconds to wait before the retry; raises `error` if it is not to be retried."""
        if error.metadata.get("code") == "CANCELLED":
            raise error
        if self._progress.begun:
            return self._progress.wait_after(error, accepted=not isinstance(error, NoServer))
        if self._others <= 0:
            raise error
        self._others -= 1
        return 0.0
