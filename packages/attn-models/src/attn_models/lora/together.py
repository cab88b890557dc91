"""Linear layers with adapters in training: layers of one input together, with sums in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from attn_core.first_order import first_order_only
from attn_core.kernels.base import needs_operations
from attn_core.kernels.product import ProductKernel, product_kernel
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


class AdaptedLinear(NamedTuple):
    """A linear layer x W^T + bias + `scaling` (x A^T) B^T with frozen `weight` W [outputs, inputs] and `bias`
    [outputs], and with trained `a` [rank, inputs] and `b` [outputs, rank]."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scaling: float


class Adapted(torch.autograd.Function):
    """Such layers of the same rows [row, inputs]: their products with A are one, and so are the gradients of the rows,
    which are added up in place."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, layers: Sequence[AdaptedLinear], kernel: ProductKernel | None, *trained: Tensor
    ) -> tuple[Tensor, ...]:
        """The output [row, outputs] of each layer; `trained` are A and B of each, to which gradients flow."""
        low, outs = _product(kernel, rows, torch.cat(trained[::2]).T), []
        parts = low.split_with_sizes([b.shape[1] for b in trained[1::2]], 1)
        for layer, b, part in zip(layers, trained[1::2], parts, strict=True):
            out = _product(kernel, rows, layer.weight.T)
            if layer.bias is not None:
                out += layer.bias
            outs.append(_product(kernel, part, (layer.scaling * b).T, out))
        ctx.save_for_backward(rows, low, *trained)
        ctx.layers, ctx.kernel = [(layer.weight, layer.scaling) for layer in layers], kernel
        ctx.set_materialize_grads(False)
        return tuple(outs)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *changes: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the rows, if they are wanted, and of A and B of each layer."""
        rows, low, *trained = ctx.saved_tensors
        kernel, a, b = ctx.kernel, trained[::2], trained[1::2]
        ranks = [part.shape[1] for part in b]
        low_change = torch.zeros_like(low)
        to_b: list[Tensor | None] = []
        to_rows: Tensor | None = None
        splits = low.split_with_sizes(ranks, 1), low_change.split_with_sizes(ranks, 1)
        for (weight, scaling), up, part, into, change in zip(ctx.layers, b, *splits, changes, strict=True):
            if change is None:
                to_b.append(None)
                continue
            into.copy_(_product(kernel, change, scaling * up))
            to_b.append(_product(kernel, (scaling * part).T, change).T)
            if ctx.needs_input_grad[0]:
                to_rows = _product(kernel, change, weight, to_rows)
        if to_rows is not None:
            _product(kernel, low_change, torch.cat(a), to_rows)
        to_a = _product(kernel, low_change.T, rows).split_with_sizes(ranks)
        return to_rows, None, None, *(part for pair in zip(to_a, to_b, strict=True) for part in pair)


def _product(kernel: ProductKernel | None, left: Tensor, right: Tensor, to: Tensor | None = None) -> Tensor:
    """The product of two matrices, added to `to` in place if it is given."""
    if kernel is not None:
        return kernel.product(left, right, to)
    # Not `addmm_`, which PyTorch's FLOP counter does not know.
    return torch.mm(left, right) if to is None else torch.addmm(to, left, right, out=to)


def adapted(rows: Tensor, layers: Sequence[AdaptedLinear]) -> list[Tensor] | None:
    """The output [..., outputs] of each layer for the same rows [..., inputs], with gradients to the rows and to all A
    and B; None if anything is not float32, or if weights are trained, too."""
    parts = [part for layer in layers for part in layer[:4] if part is not None]
    fixed = [part for layer in layers for part in layer[:2] if part is not None]
    if any(part.dtype is not torch.float32 for part in (rows, *parts)) or any(part.requires_grad for part in fixed):
        return None
    trained = [part for layer in layers for part in (layer.a, layer.b)]
    observed = needs_operations(_get_current_dispatch_mode())
    kernel = None if observed else product_kernel(rows, layers[0].weight, None)
    outs = Adapted.apply(rows.flatten(0, -2), layers, kernel, *trained)  # type: ignore[no-untyped-call]
    return [out.view(*rows.shape[:-1], -1) for out in outs]
