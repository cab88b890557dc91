"""What draws the indexer to the attention while training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def divergence(scores: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """KL(p ‖ softmax(I)) over the chosen keys, [batch, query], 0 where there are none.

    `scores` I [batch, query, key]; `weights` [batch, heads, query, key] of the attention, whose mean over the heads is
    p and gets no gradient (equation 4 of the paper).
    """
    target = weights.detach().mean(1)
    lowest = torch.finfo(scores.dtype).min / 2
    logs = scores.masked_fill(~chosen, lowest).log_softmax(-1)
    found: Tensor = (torch.xlogy(target, target) - target * logs.masked_fill(~chosen, 0.0)).sum(-1)
    return found


def with_loss(output: Tensor, loss: Tensor) -> Tensor:
    """The output as it is; going back, `loss`, a scalar, gets the gradient 1 besides."""
    same: Tensor = _WithLoss.apply(output, loss)  # type: ignore[no-untyped-call]
    return same


class _WithLoss(Function):
    """As `with_loss`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor) -> Tensor:
        """`output`, unchanged."""
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the output, and 1."""
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)
