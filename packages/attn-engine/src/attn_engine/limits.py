"""How much the engine does at once."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """`step_tokens` is the most tokens of one step: running requests take one each, the rest goes to prompts.

    `waiting` is the most requests that may wait; one more is refused with `OutOfCapacity`.
    """

    step_tokens: int = 256
    waiting: int = 1024

    def __post_init__(self) -> None:
        for field in ("step_tokens", "waiting"):
            if getattr(self, field) < 1:
                raise InvalidValue.of(field, getattr(self, field), "a whole number from 1")


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy an engine is. The last four count since it began."""

    running: int
    waiting: int
    state_tokens_used: int
    state_tokens_total: int
    preemptions: int
    computed_tokens: int
    generated_tokens: int
    shared_tokens: int = 0
