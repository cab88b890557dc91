"""What is asked of the engine."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from attn_core.errors import ContextLengthExceeded, InvalidValue

from attn_engine.sampling import MOST_ALTERNATIVES, Sampling


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Asks for the log-probabilities of the given tokens instead of new ones, with the n likeliest alternatives."""

    alternatives: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.alternatives <= MOST_ALTERNATIVES:
            raise InvalidValue.of("alternatives", self.alternatives, f"a whole number from 0 to {MOST_ALTERNATIVES}")


DEFAULT_TASK = Sampling()


@dataclass(frozen=True, kw_only=True)
class Request:
    """One sequence to continue (`task` is `Sampling`) or to score (`task` is `Scoring`).

    `token_ids` is the prompt; `source_ids` the source, for models that attend to one. `deadline` is a moment of
    `time.monotonic()`, in seconds. Of waiting requests the highest `priority` goes first,
    then the one whose `tenant` was served least for its share (`EngineLimits.shares`), then the oldest. States of
    equal beginnings are shared only between requests of one `scope`, such as a tenant's; None shares nothing.
    """

    id: str
    token_ids: tuple[int, ...]
    task: Sampling | Scoring = DEFAULT_TASK
    source_ids: tuple[int, ...] | None = None
    deadline: float | None = None
    priority: int = 0
    scope: str | None = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(self.token_ids))
        if self.source_ids is not None:
            object.__setattr__(self, "source_ids", tuple(self.source_ids))

    @property
    def new_tokens(self) -> int:
        """The most tokens that may be generated."""
        return self.task.max_new_tokens if isinstance(self.task, Sampling) else 0

    @property
    def completions(self) -> int:
        """How many completions are asked for; 1 where there is nothing to complete."""
        return self.task.completions if isinstance(self.task, Sampling) else 1


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """What a request must fit: the model's vocabulary, context and longest source, which is None if it reads none."""

    vocabulary: int
    context: int
    source_context: int | None

    def check(self, request: Request) -> None:
        """Raise `InvalidValue` naming the field, or `ContextLengthExceeded` with its three numbers."""
        self._check_ids("token_ids", request.token_ids)
        if isinstance(request.task, Sampling):
            self._check_ids("logit_bias", request.task.logit_bias, needed=False)
        if self.source_context is not None:
            if request.source_ids is None:
                raise InvalidValue.of("source_ids", None, "at least one token, as the model attends to a source")
            self._check_ids("source_ids", request.source_ids)
            if len(request.source_ids) > self.source_context:
                allowed = f"at most {self.source_context} tokens, the longest source of the model"
                raise InvalidValue.of("source_ids", f"{len(request.source_ids)} tokens", allowed)
        elif request.source_ids is not None:
            raise InvalidValue.of("source_ids", f"{len(request.source_ids)} tokens", "none, the model has no source")
        if len(request.token_ids) + request.new_tokens > self.context:
            raise ContextLengthExceeded.of(len(request.token_ids), request.new_tokens, self.context)

    def _check_ids(self, field: str, ids: Collection[Any], *, needed: bool = True) -> None:
        if needed and not ids:
            raise InvalidValue.of(field, "no tokens", "at least one token")
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidValue.of(f"{field}[{i}]", token, "a whole number")
            if not 0 <= operator.index(token) < self.vocabulary:
                raise InvalidValue.of(f"{field}[{i}]", token, f"a token id from 0 to {self.vocabulary - 1}")
