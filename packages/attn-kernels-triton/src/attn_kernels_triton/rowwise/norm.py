"""RMSNorm, alone or fused with the addition before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attn_core.first_order import first_order_only
from torch import Tensor

from attn_kernels_triton.backends.conditions import MAX_NORM_ROW
from attn_kernels_triton.kernels.rowwise import Norm, Unnorm, norm_rows, unnorm_rows
from attn_kernels_triton.launch import Launch, laid, laid_like, specialized, warm_up_backward
from attn_kernels_triton.rowwise.rows import (
    BACKWARD_WARPS,
    check_added,
    check_gain,
    check_rows,
    flat,
    matrix,
    norm_tile,
)


class Normed(NamedTuple):
    """Inputs and outputs [row, size] of the forward kernel; `added` and the sum `total` are None without addition."""

    rows: Tensor
    added: Tensor | None
    total: Tensor | None
    gain: Tensor | None
    out: Tensor


def norm_launch(work: Normed, eps: float) -> Launch:
    """The launch of the forward kernel."""
    count, size = work.rows.shape
    tile, warps = norm_tile(size)
    rows, added, total, out = (matrix(part) for part in (work.rows, work.added, work.total, work.out))
    call = Norm(rows, added, total, work.gain, out, count, eps, tile)
    return Launch(program=norm_rows, programs=-(-count // tile.rows.value), call=call, warps=warps, stages=1)


class Unnormed(NamedTuple):
    """The operands of the backward kernel, [row, size].

    `rows` were normalized; `out` and `total` are the gradients of the two results (`total` may be None); the kernel
    writes the gradient `change` of the rows and the partial sums `gains` [program, size] of that of the gain.
    """

    rows: Tensor
    gain: Tensor | None
    out: Tensor
    total: Tensor | None
    change: Tensor
    gains: Tensor | None


def unnorm_launch(work: Unnormed, eps: float) -> Launch:
    """The launch of the backward kernel."""
    count, size = work.rows.shape
    tile, warps = norm_tile(size)
    programs = programs_of(count, size)
    rows, out, total, change, gains = (
        matrix(part) for part in (work.rows, work.out, work.total, work.change, work.gains)
    )
    call = Unnorm(rows, work.gain, out, total, change, gains, count, programs, eps, tile)
    return Launch(program=unnorm_rows, programs=programs, call=call, warps=warps, stages=1)


def programs_of(count: int, size: int) -> int:
    """The grid size of the backward kernel for `count` rows."""
    tile, warps = norm_tile(size)
    return int(min(-(-count // tile.rows.value), BACKWARD_WARPS // warps))


class RmsNorm(torch.autograd.Function):
    """RMSNorm of rows [row, size] with an optional gain [size]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        """Run the forward kernel."""
        out = fresh(rows)
        norm_launch(Normed(rows, None, None, gain, out), eps).run(rows.device)
        ctx.save_for_backward(rows, gain)
        ctx.eps = eps
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """The gradients of rows and gain."""
        rows, gain = ctx.saved_tensors
        return *gradients(Kept(rows, gain, ctx.eps), out, None, gain_wanted=ctx.needs_input_grad[1]), None


class RmsNormOfSum(torch.autograd.Function):
    """The sum of rows [row, size] and `added`, of the same or a narrower dtype, and its RMSNorm with an optional gain.

    Both results have the dtype of the rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Run the forward kernel."""
        total, out = fresh(rows), fresh(rows)
        norm_launch(Normed(rows, added, total, gain, out), eps).run(rows.device)
        ctx.save_for_backward(total, gain)
        ctx.eps, ctx.added_dtype = eps, added.dtype
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, total: Tensor | None, out: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of both summands, which differ in dtype only, and of the gain."""
        if out is None:
            return total, None if total is None else total.to(ctx.added_dtype), None, None
        rows, gain = ctx.saved_tensors
        change, gains = gradients(Kept(rows, gain, ctx.eps), out, total, gain_wanted=ctx.needs_input_grad[2])
        return change, change.to(ctx.added_dtype), gains, None


class Kept(NamedTuple):
    """The values of a forward call that its gradients need: the normalized rows [row, size], gain or None, epsilon."""

    rows: Tensor
    gain: Tensor | None
    eps: float


def gradients(kept: Kept, out: Tensor, total: Tensor | None, *, gain_wanted: bool) -> tuple[Tensor, Tensor | None]:
    """The gradients of the normalized rows and of the gain, given those of the result and, unless None, of the sum."""
    rows, gain, eps = kept
    parts = None
    if gain_wanted and gain is not None:
        parts = torch.empty(programs_of(*rows.shape), rows.shape[1], dtype=torch.float32, device=rows.device)
    change = fresh(rows)
    out, summed = laid_like(flat(out), change), None if total is None else laid_like(flat(total), change)
    work = Unnormed(rows, gain, out, summed, change, parts)
    unnorm_launch(work, eps).run(rows.device)
    return work.change, None if parts is None or gain is None else parts.sum(0).to(gain.dtype)


def warm_up(kept: Kept, added: Tensor | None = None) -> None:
    """Run the backward kernel once for each kind of call; `added` is the other summand, or None without addition."""
    rows, gain, summed = kept.rows, kept.gain, added is not None
    wanted = gain is not None and gain.requires_grad
    types = rows.dtype, None if gain is None else gain.dtype
    kind = "norm", *types, *laid(rows, gain), rows.shape[1], *specialized(rows.shape[0]), wanted, summed

    def backward() -> None:
        change = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        gradients(kept, change, change if summed else None, gain_wanted=wanted)

    warm_up_backward((rows, added, gain), kind, backward)


def fresh(rows: Tensor) -> Tensor:
    """An uninitialized contiguous tensor of the same shape."""
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def rms_norm(rows: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """See `attn_core.NormKernel.norm`; raises `InvalidValue`, see `rowwise.rows`."""
    check_rows("rows", rows, MAX_NORM_ROW)
    check_gain(gain, rows)
    given = flat(rows)
    warm_up(Kept(given, gain, eps))
    out: Tensor = RmsNorm.apply(given, gain, eps)  # type: ignore[no-untyped-call]
    return out.view(rows.shape)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def rms_norm_sum(rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """See `attn_core.NormKernel.norm_sum`; raises `InvalidValue`, see `rowwise.rows`."""
    check_rows("rows", rows, MAX_NORM_ROW)
    check_added(added, rows)
    check_gain(gain, rows)
    given = flat(rows), flat(added)
    warm_up(Kept(given[0], gain, eps), given[1])
    total, out = RmsNormOfSum.apply(*given, gain, eps)  # type: ignore[no-untyped-call]
    return total.view(rows.shape), out.view(rows.shape)
