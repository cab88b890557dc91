"""The exponential moving average of the weights over the updates of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

PREFIX = "average:"
"""Before the names of parameters, in a checkpoint."""


class WeightAverage:
    """After each update of `model`, decay · average + (1 - decay) · weights, of those that are trained.

    The first update gives the weights themselves, as in torch's `AveragedModel`, so that initial weights do not count.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """To be called after each update of the weights."""
        if not self._average:
            self._average = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
            return
        for name, parameter in self._trained.items():
            self._average[name].lerp_(parameter, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it, the weights of the model are the averages; there are none before the first update."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Let weights and averages change places: a second call puts them back."""
        for name, average in self._average.items():
            weights = self._trained[name].detach().clone()
            self._trained[name].copy_(average)
            average.copy_(weights)

    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps, as "average:parameter" -> tensor; empty before the first update."""
        return {PREFIX + name: average for name, average in self._average.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave."""
        of = self._trained
        self._average = {
            name: state[PREFIX + name].to(of[name].device, copy=True) for name in of if PREFIX + name in state
        }
