"""Gradients through layers whose weights are packed and stay as they are, for adapters on a quantized base."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_models.lora.sites import dense_weight


class FrozenProduct(torch.autograd.Function):
    """The output of a packed layer; the gradient of its rows is that of a product with what its weights stand for.

    Where inputs are rounded too, the rounding counts as the identity in backward passes (straight-through).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, module: nn.Module, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """`multiply(rows)`."""
        ctx.module, ctx.multiply = module, multiply
        return multiply(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient [..., outputs] times the weight [outputs, inputs], which is made anew and not kept."""
        gradient = gradients[0]
        weight = dense_weight(_Multiplying(ctx.module, ctx.multiply), ctx.module.inputs)
        return (gradient.to(weight.dtype) @ weight).to(gradient.dtype), None, None


class _Multiplying(nn.Module):
    """A packed layer that computes as it did before `let_gradients_through`."""

    def __init__(self, module: nn.Module, multiply: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.multiply = module, multiply
        self.bias = getattr(module, "bias", None)

    def forward(self, rows: Tensor) -> Tensor:
        """The product of rows [..., inputs], with the bias."""
        return self.multiply(rows)


def let_gradients_through(model: nn.Module) -> None:
    """From now on gradients reach the inputs of the model's packed layers; their weights have none."""
    for module in model.modules():
        if hasattr(module, "inputs") and hasattr(module, "outputs") and not isinstance(module, nn.Linear):
            plain: Any = module.forward
            module.forward = partial(_forward, module, plain)


def _forward(module: nn.Module, multiply: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or not rows.requires_grad:
        return multiply(rows)
    out: Tensor = FrozenProduct.apply(rows, module, multiply)  # type: ignore[no-untyped-call]
    return out
