"""Linear layers with unpacked weights, and activations, in float32 with gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch
from attn_core.errors import InvalidValue
from attn_core.first_order import first_order_only
from attn_core.kernels.product import FORMS
from attn_core.kernels.rowwise import Activation
from torch import Tensor

from attn_kernels_cpu.library import MatrixStruct, library


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """The matrix product of `left` [rows, depth] and `right` [depth, columns], plus `bias` [columns], in float32.

    Either matrix may be a transposed view. Every element is one chain of fused multiply-adds in the order of depth,
    whatever the number of threads. Raises `InvalidValue` for other dtypes, devices and shapes.
    """
    return _multiplied("attn_product", left, right, bias)


def add_product(to: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add the `product` of float32 matrices to the contiguous `to` [rows, columns] in place, and return it."""
    left, right = in_lines(left), in_lines(right)
    sizes = *to.shape, left.shape[1], torch.get_num_threads()
    library().attn_add_product(ctypes.byref(matrix(left)), ctypes.byref(matrix(right)), to.data_ptr(), *sizes)
    return to


def rounded_product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `product`, with elements rounded to bfloat16 first; sums and bias stay float32 (arXiv 1905.12322).

    CPUs with bfloat16 instructions treat numbers below 2^-126 as zero and sum in another order than CPUs without them,
    so results of the two differ in their last bits.
    """
    return _multiplied("attn_rounded_product", left, right, bias)


def _multiplied(function: str, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    for name, tensor, wanted in (("left", left, 2), ("right", right, 2), ("bias", bias, 1)):
        if tensor is not None and not (
            tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.dim() == wanted
        ):
            given = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise InvalidValue.of(name, given, f"torch.float32 of {wanted} axes on the cpu")
    rows, depth, columns = left.shape[0], left.shape[1], right.shape[1]
    if right.shape[0] != depth:
        raise InvalidValue.of("right", tuple(right.shape), f"{depth} rows, as many as left has columns")
    if bias is not None and bias.shape[0] != columns:
        raise InvalidValue.of("bias", tuple(bias.shape), f"{columns} elements, as many as right has columns")
    left, right = in_lines(left), in_lines(right)
    bias = None if bias is None else bias.contiguous()
    out = torch.empty(rows, columns)
    getattr(library(), function)(
        ctypes.byref(matrix(left)),
        ctypes.byref(matrix(right)),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        depth,
        torch.get_num_threads(),
    )
    return out


def in_lines(tensor: Tensor) -> Tensor:
    """The matrix, copied unless its rows or its columns are contiguous."""
    return tensor if 1 in tensor.stride() else tensor.contiguous()


def matrix(tensor: Tensor) -> MatrixStruct:
    """The kernel argument for a matrix; if both strides are 1, the kernels take its rows as contiguous."""
    row, column = tensor.stride()
    return MatrixStruct(tensor.data_ptr(), row, column)


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`product` or `rounded_product`."""


class Linear(torch.autograd.Function):
    """A linear layer from [row, inputs] to [row, outputs]; the gradients are two more products."""

    @staticmethod
    def forward(ctx: Any, multiply: Multiply, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply the rows by the transposed weight."""
        _, of_rows, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if of_weight else None, weight if of_rows else None)
        ctx.multiply = multiply
        return multiply(rows, weight.T, bias)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that `needs_input_grad` asks for."""
        rows, weight = ctx.saved_tensors
        _, of_rows, of_weight, of_bias = ctx.needs_input_grad
        to_rows = ctx.multiply(change, weight, None) if of_rows else None
        to_weight = ctx.multiply(change.T, rows, None) if of_weight else None
        to_bias = change.sum(0) if of_bias else None
        return None, to_rows, to_weight, to_bias


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `torch.nn.functional.linear` in float32; raises as `product`. Must not be traced by torch.compile."""
    return _linear(product, rows, weight, bias)


def rounded_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like `linear`, with `rounded_product` for the forward pass and the gradients."""
    return _linear(rounded_product, rows, weight, bias)


def _linear(multiply: Multiply, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not rows.dim() or rows.shape[-1] != weight.shape[-1]:
        raise InvalidValue.of("rows", tuple(rows.shape), f"[..., {weight.shape[-1]}], as wide as the weight")
    flat = rows.flatten(0, -2) if rows.dim() > 1 else rows[None]
    out = cast("Tensor", Linear.apply(multiply, flat, weight, bias))  # type: ignore[no-untyped-call]
    return out.view(*rows.shape[:-1], weight.shape[0])


class Activated(torch.autograd.Function):
    """An element-wise activation; only its inputs are saved for the gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, form: Activation) -> Tensor:
        """Apply the activation to each element."""
        ctx.save_for_backward(rows)
        ctx.form = form
        return _activate(form, rows, None)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, None]:
        """The derivative times the gradient of the output."""
        (rows,) = ctx.saved_tensors
        return _activate(ctx.form, rows, change.contiguous()), None


def _activate(form: Activation, rows: Tensor, change: Tensor | None) -> Tensor:
    out = torch.empty_like(rows)
    change_address = None if change is None else change.data_ptr()
    library().attn_activate(
        FORMS.index(form), rows.data_ptr(), change_address, out.data_ptr(), rows.numel(), torch.get_num_threads()
    )
    return out


def activated(rows: Tensor, form: Activation) -> Tensor:
    """The activation of each element, float32, of any shape. GELU is within 2e-7 (1 + |x|) of its definition.

    Raises `InvalidValue` for an unknown form, and for other dtypes and devices.
    """
    if form not in FORMS:
        raise InvalidValue.of("form", form, ", ".join(FORMS))
    if rows.dtype != torch.float32 or rows.device.type != "cpu":
        raise InvalidValue.of("rows", f"{rows.dtype} on {rows.device}", "torch.float32 on the cpu")
    return cast("Tensor", Activated.apply(rows.contiguous(), form))  # type: ignore[no-untyped-call]
