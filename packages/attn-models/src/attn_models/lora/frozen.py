"""Gradients through packed layers with frozen weights, for training adapters on a quantized base (QLoRA)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_models.lora.sites import dense_weight


class FrozenProduct(torch.autograd.Function):
    """The output of a packed layer; the gradient of its input is that of a product with the dequantized weights.

    If the layer rounds its inputs too, the backward pass treats the rounding as the identity (straight-through).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, module: nn.Module, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `multiply(rows)`, the output of the packed layer."""
        ctx.module, ctx.multiply = module, multiply
        return multiply(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient [..., outputs] times the weight [outputs, inputs], which is dequantized for each call."""
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
        """The output [..., outputs] for `rows` [..., inputs], with the bias."""
        return self.multiply(rows)


def let_gradients_through(model: nn.Module) -> None:
    """Replace `forward` of the model's packed layers so that gradients reach their inputs, but not their weights."""
    for module in model.modules():
        if hasattr(module, "inputs") and hasattr(module, "outputs") and not isinstance(module, nn.Linear):
            plain: Any = module.forward
            module.forward = partial(_forward, module, plain)


def _forward(module: nn.Module, multiply: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or not rows.requires_grad:
        return multiply(rows)
    out: Tensor = FrozenProduct.apply(rows, module, multiply)  # type: ignore[no-untyped-call]
    return out
