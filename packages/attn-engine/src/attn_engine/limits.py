"""How much the engine does at once."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidValue

MOST_GUESSES = 32


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """`step_tokens` is the most tokens of one step: running requests take one each, the rest goes to prompts.

    `waiting` is the most requests that may wait; one more is refused with `OutOfCapacity`.
    `guesses` is how many tokens are guessed ahead, at most, for a request that does not say; see `Sampling.guesses`.
    """

    step_tokens: int = 256
    waiting: int = 1024
    guesses: int = 0

    def __post_init__(self) -> None:
        for field in ("step_tokens", "waiting"):
            if getattr(self, field) < 1:
                raise InvalidValue.of(field, getattr(self, field), "a whole number from 1")
        if not 0 <= self.guesses <= MOST_GUESSES:
            raise InvalidValue.of("guesses", self.guesses, f"a whole number from 0 to {MOST_GUESSES}")


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy an engine is. All from `preemptions` on count since it began.

    `guessed_tokens` were guessed ahead, of which `accepted_tokens` were right.
    """

    running: int
    waiting: int
    state_tokens_used: int
    state_tokens_total: int
    preemptions: int
    computed_tokens: int
    generated_tokens: int
    shared_tokens: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
