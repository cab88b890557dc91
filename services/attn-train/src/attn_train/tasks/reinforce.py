"""The loss of models whose layers sample keys: cross-entropy, plus REINFORCE for the scores that are sampled from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attn_core.reinforce import MovingBaseline, recorded_samples, reinforce_loss
from attn_models.evaluation import IGNORED
from torch import Tensor, nn
from torch.nn import functional


class Reinforce:
    """Mean cross-entropy with an unbiased gradient estimate of its expectation over the samples.

    The reward of a sample is the log likelihood of the whole output of its sequence. The baseline is a moving average
    of the mean log likelihood per token, times the number of tokens of the sequence (Xu et al. 2015, arXiv 1502.03044,
    equations 11 and 12, where all outputs of a batch have the same length).
    """

    def __init__(self) -> None:
        self._baseline = MovingBaseline()

    def loss(self, model: nn.Module, logits: Callable[[], Tensor], targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Return the loss, a scalar in nats per target.

        `logits` is called to compute logits [batch, targets, classes]; `targets` [batch, targets] that are `IGNORED` do
        not count, and if all are, the loss is 0.
        """
        with recorded_samples(model) as samples:
            scores = logits()
        flat = functional.cross_entropy(
            scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none"
        )
        losses, counts = flat.view(targets.shape).sum(1), (targets != IGNORED).sum(1)
        total = counts.sum().clamp(min=1)
        mean = losses.sum() / total
        if not samples or not counts.any() or not torch.is_grad_enabled():
            return mean
        before = self._baseline.update(-mean)
        extra = reinforce_loss(samples, -losses, before * counts) * (len(targets) / total)
        # Adds only the gradient: the value of the loss remains the cross-entropy.
        return mean + extra - extra.detach()

    def state(self) -> Mapping[str, Tensor]:
        """Return the state for a checkpoint, by name; empty before the first sample."""
        value = self._baseline.value
        return {} if value is None else {"baseline": torch.tensor(value, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._baseline.value = state["baseline"].item() if "baseline" in state else None
