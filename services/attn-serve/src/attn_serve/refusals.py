"""Requests refused for their deadline are remembered, so that the next that are like them cost next to nothing.

Under overload most requests are refused. Asking the engine about each would take the time in which it computes the
others: a refusal holds, for a moment, for every request that has as little time and asks for as much.
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
"""How long a refusal holds. Requests may end sooner than expected, so that it is never for long."""
SHARE_OF_TIMEOUT = 0.125
"""A refusal holds for no larger share of the time that the request had."""
STEPS_AN_OCTAVE = 4
"""Timeouts count as equal that differ by less than a fourth of an octave: by at most 19 %."""
SECONDS_A_REFUSAL, LONGEST_SECONDS = 0.005, 1.0
"""With many kinds of requests at a time a refusal holds longer, by so much for each, or the engine were asked often."""


class RequestSize(NamedTuple):
    """What is known of a request before it is read: its tenant, its seconds, the tokens and bytes it is about."""

    tenant: str
    timeout: float | None
    max_new_tokens: int
    prompt_bytes: int
    resumed: bool = False

    @classmethod
    def of(
        cls, request: inference_pb2.GenerateRequest | inference_pb2.ScoreRequest, tenant: str, timeout: float | None
    ) -> RequestSize:
        """The size of a message."""
        if isinstance(request, inference_pb2.ScoreRequest):
            return cls(tenant, timeout, 0, request.ByteSize())
        sampling = request.sampling
        new = sampling.max_new_tokens if sampling.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS
        width = max(sampling.n, sampling.num_beams, 1)
        return cls(tenant, timeout, new * width, request.prompt.ByteSize(), request.HasField("resume"))

    @property
    def can_be_late(self) -> bool:
        """Whether it may be refused for its deadline: what has begun elsewhere is not, nor what has none."""
        return self.timeout is not None and not self.resumed

    @property
    def kind(self) -> tuple[str, int]:
        """Equal for requests of one tenant with nearly as much time."""
        return self.tenant, math.floor(STEPS_AN_OCTAVE * math.log2(max(self.timeout or 0.0, 1e-3)))


class _Refusal(NamedTuple):
    max_new_tokens: int
    prompt_bytes: int
    until: float
    error: OutOfCapacity


class RecentRefusals:
    """Refusals of one model that still hold. Used from one event loop.

    A request that was refused as it would end some seconds too late is in time at the earliest as many seconds later,
    and so is one that asks for no less and is of the same tenant and about the same timeout.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[tuple[str, int], _Refusal] = {}
        self.repeated = 0
        """Requests refused without asking the engine."""

    def check(self, size: RequestSize) -> None:
        """Raises `OutOfCapacity` where a refusal holds for a request of this size."""
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
        """As `check`; then notes the refusal that the block raises."""
        self.check(size)
        try:
            yield
        except OutOfCapacity as error:
            if size.can_be_late and "late_seconds" in error.metadata:
                self._note(size.kind, size, error)
            raise

    def _note(self, kind: tuple[str, int], size: RequestSize, error: OutOfCapacity) -> None:
        now = self._clock()
        if len(self._held) > MOST_SECONDS / SECONDS_A_REFUSAL:
            self._held = {kind: held for kind, held in self._held.items() if held.until > now}
        late = float(error.metadata["late_seconds"])
        seconds = min(max(late, LEAST_SECONDS), MOST_SECONDS, SHARE_OF_TIMEOUT * (size.timeout or 0.0))
        seconds = max(seconds, min(SECONDS_A_REFUSAL * len(self._held), LONGEST_SECONDS))
        # The less a refused request asked for, the more requests it stands for.
        held = self._held.get(kind)
        smaller = (
            held is None
            or held.until <= now
            or size.max_new_tokens + size.prompt_bytes <= (held.max_new_tokens + held.prompt_bytes)
        )
        if smaller:
            self._held[kind] = _Refusal(size.max_new_tokens, size.prompt_bytes, now + seconds, error)
