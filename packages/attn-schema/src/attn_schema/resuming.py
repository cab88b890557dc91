"""Resumption of a broken response stream, with no token lost, repeated or different.

The reader of a stream keeps the ids of the tokens that it has received. After a break it repeats the request, to the
same or another server, with the tokens of each completion so far in `GenerateRequest.resume`. They are computed as part
of the prompt, and the random number for each further token depends only on the seed and its position, so the rest is
the same as without the break.
"""

from __future__ import annotations

import random
import time

from attn_core.errors import AttnError, DeadlineExceeded

from attn_schema.inference import OutputDelta, PartialCompletion, Resumption
from attn_schema.sampling import SamplingParams

FIRST_WAIT = 0.02
LONGEST_WAIT = 0.5
"""The upper bound of the random wait before an attempt, in seconds: `FIRST_WAIT`, doubled each time up to this."""

MAX_BREAKS = 5
"""The maximum number of successive breaks without a new token, so that a request that crashes engines is given up."""


class StreamProgress:
    """The received part of a request, and the decision whether and when to retry after a break.

    `resume` is what was received earlier. `timeout` is the time until the caller's deadline, in seconds from now;
    `patience` is the number of seconds of failures without a new token after which a break is final.
    """

    def __init__(self, resume: Resumption | None = None, timeout: float | None = None, patience: float = 120.0) -> None:
        partials = resume.received if resume else ()
        self._tokens = {partial.index: list(partial.token_ids) for partial in partials}
        self._finished = {partial.index for partial in partials if partial.finished}
        self._computed_on = resume.computed_on if resume else ""
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._patience = patience
        self._failing_since: float | None = None
        self._breaks = 0
        self._wait = FIRST_WAIT
        self.resumptions = 0
        """The number of times that the request has been resumed."""
        self.begun = False
        """Whether any delta has been received."""

    def take(self, delta: OutputDelta) -> OutputDelta:
        """Record a delta and return it; the last one is returned with the number of resumptions added."""
        self._tokens.setdefault(delta.index, []).extend(token.id for token in delta.tokens)
        if delta.finish_reason is not None:
            self._finished.add(delta.index)
        if delta.computed_on and delta.computed_on not in self._computed_on:
            self._computed_on += f"; then {delta.computed_on}" if self._computed_on else delta.computed_on
        self.begun, self._failing_since, self._breaks, self._wait = True, None, 0, FIRST_WAIT
        if delta.usage is None or not self.resumptions:
            return delta
        return delta.replace(resumptions=delta.resumptions + self.resumptions)

    @property
    def resume(self) -> Resumption | None:
        """The state from which to continue; None if no token was received, so that the request starts over."""
        partials = tuple(
            PartialCompletion(index=index, token_ids=tuple(tokens), finished=index in self._finished)
            for index, tokens in sorted(self._tokens.items())
            if tokens or index in self._finished
        )
        if not partials:
            return None
        return Resumption(received=partials, computed_on=self._computed_on)

    def remaining(self) -> float | None:
        """Seconds until the deadline, or None without one; raises `DeadlineExceeded` if it has passed."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the request was completed")
        return left

    def wait_after(self, error: AttnError, *, accepted: bool = True) -> float:
        """Seconds to wait before the retry; raises `error` if it is final, `DeadlineExceeded` if no time is left.

        `accepted`: whether the server had accepted the request before it failed.
        """
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        self._breaks += accepted
        if self._breaks > MAX_BREAKS or now - self._failing_since > self._patience:
            raise error
        self.resumptions += accepted
        wait, self._wait = random.uniform(0, self._wait), min(2 * self._wait, LONGEST_WAIT)
        left = self.remaining()
        return wait if left is None else min(wait, left)


def seeded(params: SamplingParams) -> SamplingParams:
    """A copy with a random seed if the request samples and has none, since resumption requires a seed."""
    if params.temperature == 0 or params.seed is not None or params.num_beams > 1:
        return params
    return params.replace(seed=random.getrandbits(64))
