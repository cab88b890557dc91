"""How much the engine does at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attn_core.errors import InvalidValue

MOST_GUESSES = 32
MOST_BRANCHES = 8


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """`step_tokens` is the most tokens of one step: running requests take one each, the rest goes to prompts.

    `waiting` is the most requests that may wait; one more is refused with `OutOfCapacity`.
    `guesses` is how many tokens are guessed ahead, at most, for a request that does not say; see `Sampling.guesses`.
    `branches` is in how many ways a guess may go on at most: of more than one it is a tree, whose branches are checked
    side by side; where states cannot follow several tokens (`Engine.tree_unsupported_reason`) it stays a chain.
    `shares` are weights by tenant, 1 where none is given: one of weight 2 is served twice the tokens while both have
    requests that wait.
    `offload_bytes` is the most memory outside the store for states of requests that had to leave it; what finds none,
    or comes from a store that cannot export, is computed again.
    """

    step_tokens: int = 256
    waiting: int = 1024
    guesses: int = 0
    branches: int = 1
    shares: Mapping[str, float] = field(default_factory=dict)
    offload_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("step_tokens", "waiting"):
            if getattr(self, name) < 1:
                raise InvalidValue.of(name, getattr(self, name), "a whole number from 1")
        if self.offload_bytes < 0:
            raise InvalidValue.of("offload_bytes", self.offload_bytes, "a whole number from 0")
        if not 0 <= self.guesses <= MOST_GUESSES:
            raise InvalidValue.of("guesses", self.guesses, f"a whole number from 0 to {MOST_GUESSES}")
        if not 1 <= self.branches <= MOST_BRANCHES:
            raise InvalidValue.of("branches", self.branches, f"a whole number from 1 to {MOST_BRANCHES}")
        for tenant, weight in self.shares.items():
            if not 0 < weight < float("inf"):
                raise InvalidValue.of(f"shares[{tenant!r}]", weight, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy an engine is. All from `preemptions` on count since it began.

    `guessed_tokens` were guessed ahead, of which `accepted_tokens` were right. `reloaded_tokens` had to leave the store
    and came back without being computed again; `offloaded_bytes` are outside it now.
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
    reloaded_tokens: int = 0
    offloaded_bytes: int = 0
