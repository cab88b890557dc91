"""A short-lived cache of requests refused for their deadline, so that refusing similar requests costs almost nothing.

Under overload most requests are refused. Asking the engine about each would take the time in which it computes the
others. So a refusal holds, for a moment, for every request with about the same timeout and no smaller a size.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from attn_core.errors import OutOfCapacity
from attn_gateway import Call
from attn_schema import Prompt, SamplingParams
from attn_schema.sampling import DEFAULT_MAX_NEW_TOKENS

LEAST_SECONDS, MOST_SECONDS = 0.05, 0.25
"""The bounds of how long a refusal holds. It never holds for long, as requests may end sooner than expected."""
SHARE_OF_TIMEOUT = 0.125
"""The largest fraction of the request's timeout for which its refusal holds."""
STEPS_AN_OCTAVE = 4
"""Timeouts within the same quarter of an octave count as equal: they differ by at most 19 %."""
SECONDS_A_REFUSAL, LONGEST_SECONDS = 0.005, 1.0
"""Refusals of many kinds of requests hold longer, by this much per kind up to the second value, to spare the engine."""


MANY_MESSAGES = 10_000
BYTES_PER_TOKEN = 4
"""The usual number of bytes of a token, by which tokens of a text are estimated before it is tokenized."""


def estimated_tokens(prompt: Prompt) -> int:
    """The number of tokens of a prompt, and of its encoder prompt: exact for token ids, else by bytes of the text."""
    parts = [part for part in (prompt, prompt.encoder_prompt) if part is not None]
    texts = [*(part.text or "" for part in parts), *prompt.contents]
    ids = sum(len(part.token_ids or ()) for part in parts)
    return ids + -(-len("".join(texts).encode()) // BYTES_PER_TOKEN)


def most_new_tokens(params: SamplingParams) -> int:
    """The most tokens that a request may generate."""
    each = DEFAULT_MAX_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    return each * max(params.n, params.num_beams or 1)


class RequestSize(NamedTuple):
    """What is known of a request before it is tokenized: tenant, timeout in seconds, and sizes; tokens by estimate."""

    tenant: str
    timeout: float | None
    max_new_tokens: int
    prompt_tokens: int
    image_bytes: int = 0
    resumed: bool = False

    @classmethod
    async def of(
        cls, call: Call, prompts: Sequence[Prompt], max_new_tokens: int, *, resumed: bool = False
    ) -> RequestSize:
        """The size of a request; in a thread for long conversations, whose messages would hold up the loop."""

        def size() -> RequestSize:
            images = sum(sum(map(len, prompt.images)) for prompt in prompts)
            tokens = sum(map(estimated_tokens, prompts))
            return cls(call.tenant, call.remaining(), max_new_tokens, tokens, images, resumed)

        many = sum(len(prompt.chat or ()) for prompt in prompts) > MANY_MESSAGES
        return await asyncio.to_thread(size) if many else size()

    @property
    def prompt_size(self) -> int:
        """The size of the prompts: tokens, and bytes of images."""
        return self.prompt_tokens + self.image_bytes

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
    prompt_size: int
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
        elif size.max_new_tokens >= held.max_new_tokens and size.prompt_size >= held.prompt_size:
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
            or size.max_new_tokens + size.prompt_size <= (held.max_new_tokens + held.prompt_size)
        )
        if smaller:
            self._held[kind] = _Refusal(size.max_new_tokens, size.prompt_size, now + seconds, error)
