"""What the engine tells about a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from attn_core.errors import AttnError


class FinishReason(StrEnum):
    """Why a request ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    """The model made an end token."""
    STOP = "stop"
    """A stop string appeared."""
    LENGTH = "length"
    """All new tokens that were asked for are made."""
    SCORED = "scored"
    """All given tokens are scored."""
    CANCELLED = "cancelled"
    """It was cancelled."""
    DEADLINE = "deadline"
    """Its deadline passed."""
    FAILED = "failed"
    """An error ended it; see `Finish.error`."""


class ScoredToken(NamedTuple):
    """A token id; `logprob`, in nats, and `alternatives` (id, logprob), likeliest first, where asked for.

    Log-probabilities are those of the model's own distribution, before penalty, temperature and filters.
    """

    id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class RequestUsage:
    """What a request cost, in tokens; `computed_tokens` counts recomputation after preemption too.

    `shared_tokens` are those whose states had been computed already, for another request or before a preemption.
    """

    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    shared_tokens: int = 0

    def plus(self, other: RequestUsage, *, first: bool) -> RequestUsage:
        """With another completion of the same prompt, which counts once; the `first` says what the prompt shared."""
        return RequestUsage(
            prompt_tokens=self.prompt_tokens,
            new_tokens=self.new_tokens + other.new_tokens,
            computed_tokens=self.computed_tokens + other.computed_tokens,
            shared_tokens=(other if first else self).shared_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a request ended; `stop` is the stop string with `FinishReason.STOP`, `score` that of a beam search."""

    reason: FinishReason
    usage: RequestUsage
    stop: str | None = None
    score: float | None = None
    error: AttnError | None = None


class Event(NamedTuple):
    """News of one request in one step: new tokens, text that has become final, and how it ended.

    `text` can lag behind `tokens` while a character is incomplete or could begin a stop string; the texts of all
    events of one `choice`, which counts the completions of a request from 0, joined are that completion. The
    `last` event of a request has a `usage`: what all its completions cost together.
    """

    request: str
    choice: int = 0
    tokens: tuple[ScoredToken, ...] = ()
    text: str = ""
    finish: Finish | None = None
    usage: RequestUsage | None = None

    @property
    def last(self) -> bool:
        """Whether the request has ended, with all its completions."""
        return self.usage is not None
