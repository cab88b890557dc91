"""Calls reward functions on completions, and checks what they need and return."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attn_core import installed
from attn_core.errors import InvalidValue, UserError
from attn_schema.on_policy import OnPolicyConfig

from attn_train.doing import doing

FIELD = "config.on_policy.reward_funcs"
GIVEN = ("prompts", "completions", "completion_ids")
"""The parameters of reward functions that are no columns."""


class RewardFailed(UserError):  # noqa: N818 - named, as all errors here, for what happened
    """A reward function raised, or returned something else than a number for each completion."""

    reason = "REWARD_FAILED"


@dataclass(frozen=True)
class Scored:
    """What a reward is asked about: prompts as the dataset has them, their rows' places and columns, and completions of
    them; one of each for every completion."""

    prompts: Sequence[Any]
    places: Sequence[str]
    columns: Sequence[Mapping[str, Any]]
    completions: Sequence[str]
    completion_ids: Sequence[tuple[int, ...]]

    def __getitem__(self, place: int) -> Scored:
        """Return one completion alone."""
        return Scored(**{name: values[place : place + 1] for name, values in vars(self).items()})


class RewardFunction:
    """A reward by its name, with its function's columns: those that it needs, and all others that a row has for a
    function with `**columns`, or that it may have. Raises `UnknownName`, and `InvalidValue` for a broken target."""

    def __init__(self, name: str) -> None:
        reward = installed().rewards.get(name)
        self.name = reward.name
        module, _, function = reward.target.partition(":")
        try:
            self._function: Callable[..., Any] = getattr(importlib.import_module(module), function)
            parameters = inspect.signature(self._function).parameters.values()
        except Exception as error:
            raise InvalidValue.of(FIELD, name, f"a reward that can be imported; {reward.target}: {error}") from error
        named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
        self._all = len(named) < len(parameters)
        self._takes = {each.name for each in named}
        self.needs = {each.name for each in named if each.default is each.empty} - set(GIVEN)

    def __call__(self, scored: Scored) -> list[float | None]:
        """Return the reward of each completion, None where it does not apply.

        Raises `RewardFailed`, with the completion at fault, if the function raises or returns anything else.
        """
        with doing(f"the reward {self.name!r}"):
            try:
                found = self._called(scored)
            except (Exception, SystemExit) as error:
                raise self._failed(scored, error) from error
        count = len(scored.completions)
        if not isinstance(found, list) or len(found) != count:
            given = f"{len(found)} rewards" if isinstance(found, list) else repr(found)[:200]
            raise RewardFailed(f"the reward {self.name!r} returned {given} for {count} completions", reward=self.name)
        return [self._number(scored, place, value) for place, value in enumerate(found)]

    def _number(self, scored: Scored, place: int, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self._at(scored, place, f"returned {str(value)[:200]}, neither a finite number nor None,")
        return number

    def _called(self, scored: Scored) -> Any:
        """Return what the function returns, as a list if it is iterable."""
        given: dict[str, Any] = {name: list(getattr(scored, name)) for name in GIVEN}
        columns = dict.fromkeys(name for row in scored.columns for name in row if name not in GIVEN)
        given |= {name: [row.get(name) for row in scored.columns] for name in columns}
        found = self._function(**{name: given[name] for name in given if self._all or name in self._takes})
        return list(found) if isinstance(found, Iterable) else found

    def _failed(self, scored: Scored, error: BaseException) -> RewardFailed:
        """Return the error with the first completion for which the function also raises when asked about it alone."""
        for place in range(len(scored.completions)):
            try:
                self._called(scored[place])
            except (Exception, SystemExit) as alone:  # noqa: BLE001 -- a reward may raise anything
                return self._at(scored, place, f"raised {type(alone).__name__}: {alone}")
        return RewardFailed(f"the reward {self.name!r} raised {type(error).__name__}: {error}", reward=self.name)

    def _at(self, scored: Scored, place: int, problem: str) -> RewardFailed:
        text = scored.completions[place]
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        message = f"the reward {self.name!r} {problem} for completion {place} of the batch, of {scored.places[place]}"
        return RewardFailed(f"{message}: {shown!r}", reward=self.name, completion=place)


class Rewards:
    """The weighted sum of the rewards that a config names."""

    def __init__(self, config: OnPolicyConfig) -> None:
        self.functions = [RewardFunction(name) for name in config.reward_funcs]
        self._weights = config.reward_weights or (1.0,) * len(self.functions)

    @property
    def needs(self) -> set[str]:
        """The columns without which a reward cannot be computed."""
        return set().union(*(function.needs for function in self.functions))

    def __call__(self, scored: Scored) -> tuple[list[float], dict[str, float]]:
        """Return the weighted sum for each completion, and the mean of each function's by name; those that do not apply
        count 0.

        Raises `RewardFailed`, also for a completion to which no reward applies.
        """
        found = [function(scored) for function in self.functions]
        for place, values in enumerate(zip(*found, strict=True)):
            if all(value is None for value in values):
                what = f"completion {place} of the batch, of {scored.places[place]}"
                raise RewardFailed(f"every reward returned None for {what}", completion=place)
        sums = [
            sum(weight * (value or 0.0) for weight, value in zip(self._weights, values, strict=True))
            for values in zip(*found, strict=True)
        ]
        means: dict[str, float] = {}
        for function, given in zip(self.functions, found, strict=True):
            applied = [value for value in given if value is not None]
            means |= {function.name: sum(applied) / len(applied)} if applied else {}
        return sums, means
