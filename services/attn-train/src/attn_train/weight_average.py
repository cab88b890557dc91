"""The exponential moving average of the weights over the updates of a run, and the weights of its best measurement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from attn_schema.training import EvaluationConfig
from torch import Tensor, nn

PREFIX = "average:"
"""Prefix of parameter names in checkpoints."""


class WeightAverage:
    """The average of the trained weights of `model`: decay · average + (1 - decay) · weights after each update.

    After the first update it is the weights themselves, as in torch's `AveragedModel`: initial weights do not count.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average; to be called after each update of the weights."""
        if not self._average:
            self._average = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
            return
        for name, parameter in self._trained.items():
            self._average[name].lerp_(parameter, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the weights of the model are the averages; before the first update, they are unchanged."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap weights and averages; a second call swaps them back."""
        for name, average in self._average.items():
            weights = self._trained[name].detach().clone()
            self._trained[name].copy_(average)
            average.copy_(weights)

    def state(self) -> Mapping[str, Tensor]:
        """Return the state for a checkpoint, as "average:parameter" -> tensor; empty before the first update."""
        return {PREFIX + name: average for name, average in self._average.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._average = {
            name: state[PREFIX + name].to(weight.device, copy=True)
            for name, weight in self._trained.items()
            if PREFIX + name in state
        }


class BestWeights(WeightAverage):
    """The trained weights at the lowest validation loss, `loss`, kept if the config wants them, and the number of
    measurements since then."""

    def __init__(self, model: nn.Module, config: EvaluationConfig) -> None:
        super().__init__(model, decay=0.0)
        self._keeps, self._patience = config.load_best_model_at_end, config.early_stopping_patience
        self.wanted = self._keeps or self._patience is not None
        self.loss, self._since = math.inf, 0

    def measured(self, loss: float, *, lower: bool) -> None:
        """Count a measurement; take the weights and their loss if it is the lowest."""
        self._since = 0 if lower else self._since + 1
        if lower:
            self.loss = loss
            if self._keeps:
                self.update()

    @property
    def waited_enough(self) -> bool:
        """Whether the run is to stop, as its validation loss has not fallen for long."""
        return self._patience is not None and self._since >= self._patience

    def record(self) -> dict[str, Tensor]:
        """Return the lowest loss and the number of measurements since, float64, for a checkpoint."""
        return {"lowest": torch.tensor([self.loss, self._since], dtype=torch.float64)}

    def restore_record(self, record: Mapping[str, Tensor]) -> None:
        """Restore what `record` returned."""
        self.loss, self._since = record["lowest"][0].item(), int(record["lowest"][1])
