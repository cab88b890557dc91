"""A short-lived cache of requests refused for their deadline, so that refusing similar requests costs almost nothing.

Under overload most requests are refused. Asking the engine about each would take the time in which it computes the
others. So a refusal holds, for a moment, for every request with about the same timeout and no smaller a size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from attn.v1 import inference_pb2
from attn_core.errors import OutOfCapacity
from attn_schema.sampling import DEFAULT_MAX_NEW_TOKENS

LEAST_SECONDS, MOST_SECONDS = 0.05, 0.25
"""The bounds of how long a refusal holds. It never holds for long, as requests may end sooner than expected."""
SHARE_OF_TIMEOUT = 0.125
"""The largest fraction of the request's timeout for which its refusal holds."""
STEPS_AN_OCTAVE = 4
"""Timeouts within the same quarter of an octave count as equal: they differ by at most 19 %."""
SECONDS_A_REFUSAL, LONGEST_SECONDS = 0.005, 1.0
"""Refusals of many kinds of requests hold longer, by this much per kind up to the second value, to spare the engine."""


class RequestSize(NamedTuple):
    """What is known of a request before it is decoded: tenant, timeout in seconds, new tokens and prompt bytes."""

    tenant: str
    timeout: float | None
    max_new_tokens: int
    prompt_bytes: int
    resumed: bool = False

    @classmethod
    def of(
        cls, request: inference_pb2.GenerateRequest | inference_pb2.ScoreRequest, tenant: str, timeout: float | None
    ) -> RequestSize:
        """The size of a request message."""
        if isinstance(request, inference_pb2.ScoreRequest):
            return cls(tenant, timeout, 0, request.ByteSize())
        sampling = request.sampling
        new = sampling.max_new_tokens if sampling.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS
        width = max(sampling.n, sampling.num_beams, 1)
        return cls(tenant, timeout, new * width, request.prompt.ByteSize(), request.HasField("resume"))

    @property
    def can_be_late(self) -> bool:
        """Whether it may be refused for its deadline: not if it has none, or resumes a request that was running."""
        return self.timeout is not None and not self.resumed

    @property
    def kind(self) -> tuple[str, int]:
        """A key that is equal for requests of one tenant with about the same timeout."""
        return self.tenant, math.floor(STEPS_AN_OCTAVE * math.log2(max(self.timeout or 0.0, 1e-3)))


class _Refusal(NamedTuple):
    max_new_tokens: int
    prompt_bytes: int
    until: float
    error: OutOfCapacity


class RecentRefusals:
    """The refusals of one model that still hold. Used from one event loop.

    If a request was refused because it would finish some seconds too late, it could meet its deadline at the earliest
    that many seconds later. The same holds for requests of the same tenant, about the same timeout and no smaller size.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[tuple[str, int], _Refusal] = {}
        self.repeated = 0
        """The number of requests refused without asking the engine."""

    def check(self, size: RequestSize) -> None:
        """Raise `OutOfCapacity` if a refusal holds for a request of this size."""
        held = self._held.get(size.kind) if size.can_be_late else None
        if held is None:
            return
        if self._clock() >= held.until:
            del self._held[size.kind]
        elif size.max_new_tokens >= held.max_new_tokens and size.prompt_bytes >= held.prompt_bytes:
            self.repeated += 1
            raise OutOfCapacity(held.error.message, **held.error.metadata)

    @contextmanager
    def apply(self, size: RequestSize) -> Iterator[None]:
        """Call `check`, then record the refusal that the `with` block raises, if any."""
        self.check(size)
        try:
            yield
        except OutOfCapacity as error:
            if size.can_be_late and "late_seconds" in error.metadata:
                self._record(size.kind, size, error)
            raise

    def _record(self, kind: tuple[str, int], size: RequestSize, error: OutOfCapacity) -> None:
        now = self._clock()
        if len(self._held) > MOST_SECONDS / SECONDS_A_REFUSAL:
            self._held = {kind: held for kind, held in self._held.items() if held.until > now}
        late = float(error.metadata["late_seconds"])
        seconds = min(max(late, LEAST_SECONDS), MOST_SECONDS, SHARE_OF_TIMEOUT * (size.timeout or 0.0))
        seconds = max(seconds, min(SECONDS_A_REFUSAL * len(self._held), LONGEST_SECONDS))
        # The smaller a refused request is, the more requests its refusal covers.
        held = self._held.get(kind)
        smaller = (
            held is None
            or held.until <= now
            or size.max_new_tokens + size.prompt_bytes <= (held.max_new_tokens + held.prompt_bytes)
        )
        if smaller:
            self._held[kind] = _Refusal(size.max_new_tokens, size.prompt_bytes, now + seconds, error)
