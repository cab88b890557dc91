"""A model family under test and the configs with which it is tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from attn_core import ModelFamily, installed
from torch import Tensor

from attn_testing.law import seeded
from attn_testing.memory import DictionaryStore, rounding
from attn_testing.serving import ragged
from attn_testing.subject import JITTER

Values = Mapping[str, Any]
"""A model's config as plain values."""


@dataclass(frozen=True, eq=False)
class ModelCase:
    """A model family with one config; models are float64."""

    family: ModelFamily
    values: Values
    label: str

    @cached_property
    def model(self) -> Any:
        """The model that most laws share."""
        return self.build()

    def build(self, seed: int = 0) -> Any:
        """Build a new model in evaluation mode, with weights drawn from `seed`."""
        with seeded(seed):
            model = self.family.build(self.family.configure(self.values)).double()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(JITTER * torch.randn_like(weight))
        return model.eval()

    @property
    def tolerance(self) -> float:
        """The tolerance between two float64 computations of the same result."""
        return max(1e-9, rounding(self.model.state_specs().values()))

    def tokens(self, *shape: int, seed: int = 1) -> Tensor:
        """Random token ids [*shape], int64."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.model.vocab_size, shape, generator=generator)


@dataclass(frozen=True, eq=False)
class ModelSubject:
    """A model family, given by name or as an object, and plain configs of small models by label."""

    given: str | ModelFamily
    configs: Mapping[str, Values]

    @cached_property
    def family(self) -> ModelFamily:
        """The model family; raises `UnknownName` if no plugin offers it."""
        return installed().models.get(self.given) if isinstance(self.given, str) else self.given

    @cached_property
    def cases(self) -> list[ModelCase]:
        """A case for every config."""
        return [ModelCase(self.family, values, label) for label, values in self.configs.items()]


class ModelServing:
    """Runs a model in steps over several requests, whose states are in a `DictionaryStore`.

    `done` is the number of computed tokens of each request.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.store = DictionaryStore(model.state_specs())
        self.done: dict[int, int] = {}

    def step(self, new: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Logits [tokens, vocabulary] of the new tokens [tokens] of each request, computed in one step."""
        with torch.no_grad():
            logits = self.model.logits(self.hidden(new))
        return dict(zip(new, logits.split([len(tokens) for tokens in new.values()]), strict=True))

    def hidden(self, new: Mapping[int, Tensor]) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of all requests, computed in one step."""
        for name in new:
            if name not in self.done:
                self.store.admit(name)
                self.done[name] = 0
        names: Sequence[int] = list(new)
        batch = ragged([len(new[name]) for name in names], [self.done[name] for name in names])
        with torch.no_grad():
            hidden: Tensor = self.model.step(torch.cat(list(new.values())), batch, self.store.view(batch, names))
        for name in names:
            self.done[name] += len(new[name])
        return hidden
