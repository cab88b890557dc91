"""How the stream of a request goes on after a break, with no token lost, repeated or different.

Whoever reads a stream keeps the ids of the tokens that it has received. After a break it asks again, here or elsewhere,
with `GenerateRequest.resume`: the tokens of each completion so far. They are computed as part of the prompt, and the
random number of each further token depends on the seed and its position alone, so the rest is what it would have been.
"""

from __future__ import annotations

import random
import time

from attn_core.errors import AttnError, DeadlineExceeded

from attn_schema.inference import OutputDelta, PartialCompletion, Resumption
from attn_schema.sampling import SamplingParams

FIRST_WAIT = 0.02
LONGEST_WAIT = 0.5
"""Seconds between attempts, of which a random part is waited: the first, doubled up to the longest."""

MAX_BREAKS = 5
"""Breaks of a stream in a row, without a token between them: a request that kills whoever computes it ends then."""


class StreamProgress:
    """What of a request has been received, and whether and when to ask again after a break.

    `resume` is what was received before. `timeout` is the time until the caller's deadline and `patience` the time
    without a new token after which a break is final, both in seconds from now.
    """

    def __init__(self, resume: Resumption | None = None, timeout: float | None = None, patience: float = 120.0) -> None:
        partials = resume.received if resume else ()
        self._tokens = {partial.index: list(partial.token_ids) for partial in partials}
        self._finished = {partial.index for partial in partials if partial.finished}
        self._computed_on = resume.computed_on if resume else ""
        self._model = resume.model if resume else ""
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._patience = patience
        self._failing_since: float | None = None
        self._breaks = 0
        self._wait = FIRST_WAIT
        self.resumptions = 0
        """How often the request has been asked again."""
        self.begun = False
        """Whether anything has been received."""

    def take(self, delta: OutputDelta) -> OutputDelta:
        """Note a delta, which is returned; the last one says how often the request was resumed."""
        self._tokens.setdefault(delta.index, []).extend(token.id for token in delta.tokens)
        if delta.finish_reason is not None:
            self._finished.add(delta.index)
        if delta.computed_on and delta.computed_on not in self._computed_on:
            self._computed_on += f"; then {delta.computed_on}" if self._computed_on else delta.computed_on
        self._model = self._model or delta.model
        self.begun, self._failing_since, self._breaks, self._wait = True, None, 0, FIRST_WAIT
        if delta.usage is None or not self.resumptions:
            return delta
        return delta.replace(resumptions=delta.resumptions + self.resumptions)

    @property
    def resume(self) -> Resumption | None:
        """Where the request goes on; None where no token was received, so that it begins again."""
        partials = tuple(
            PartialCompletion(index=index, token_ids=tuple(tokens), finished=index in self._finished)
            for index, tokens in sorted(self._tokens.items())
            if tokens or index in self._finished
        )
        if not partials:
            return None
        return Resumption(received=partials, computed_on=self._computed_on, model=self._model)

    def remaining(self) -> float | None:
        """Seconds until the deadline, None without one; raises `DeadlineExceeded` when it is over."""
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the request was completed")
        return left

    def wait_after(self, error: AttnError, *, accepted: bool = True) -> float:
        """Seconds to wait before asking again; raises `error` if it is final, `DeadlineExceeded` if no time is left.

        `accepted` says whether the request was running when it broke.
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
    """With a random seed where the request samples and has none, as it could not be resumed without."""
    if params.temperature == 0 or params.seed is not None:
        return params
    return params.replace(seed=random.getrandbits(64))
