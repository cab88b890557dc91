"""The loss of models whose layers sample keys: cross-entropy, and REINFORCE for the scores behind the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attn_core.reinforce import MovingBaseline, recorded_samples, reinforce_loss
from attn_models.evaluation import IGNORED
from torch import Tensor, nn
from torch.nn import functional


class Reinforce:
    """Mean cross-entropy whose gradient is, over the samples, on average that of its expectation.

    A sample is rewarded with the log likelihood of the whole output of its sequence. The baseline is a moving average
    of the mean log likelihood of a token, times the tokens of the sequence (Xu et al. 2015, arXiv 1502.03044,
    equations 11 and 12, where all outputs of a batch are equally long).
    """

    def __init__(self) -> None:
        self._baseline = MovingBaseline()

    def loss(self, model: nn.Module, logits: Callable[[], Tensor], targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """A scalar, in nats per target: of logits [batch, targets, classes], which the call computes, and targets
        [batch, targets], those that are `IGNORED` left out.
        """
        with recorded_samples(model) as samples:
            scores = logits()
        flat = functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
        )
        losses, counts = flat.view(targets.shape).sum(1), (targets != IGNORED).sum(1)
        mean = losses.sum() / counts.sum()
        if not samples:
            return mean
        before = self._baseline.update(-mean)
        extra = reinforce_loss(samples, -losses, before * counts) * (len(targets) / counts.sum())
        # Only its gradient: the value stays that of the cross-entropy.
        return mean + extra - extra.detach()

    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps, by name; empty before the first sample."""
        value = self._baseline.value
        return {} if value is None else {"baseline": torch.tensor(value, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave."""
        self._baseline.value = state["baseline"].item() if "baseline" in state else None
