"""Norms, gates, rotary positions and losses in float32 in training, with gradients, each in one pass over memory."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from attn_core.first_order import first_order_only
from attn_core.kernels.product import FORMS
from attn_core.kernels.rowwise import Activation, Targets
from torch import Tensor, nn

from attn_kernels_cpu.library import ADDRESS, library

ROWS_OF_A_GAIN = 64
"""`ROWS_OF_A_GAIN` of native/rowwise.hpp."""


def readable(*parts: Tensor | None) -> bool:
    """Whether kernels can read these tensors: float32 on the CPU with plain memory, outside of graph tracing and
    torch.func transforms, which need PyTorch's operations."""
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # noqa: SLF001
    if traced or torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        return False
    given = [part for part in parts if part is not None]
    plain = all(type(part) in (Tensor, nn.Parameter) and part.device.type == "cpu" for part in given)
    return plain and all(part.dtype is torch.float32 for part in given)


class NormStruct(ctypes.Structure):
    """The struct `Norm` of native/rowwise.hpp."""

    _fields_ = (
        *((name, ADDRESS) for name in ("rows", "added", "gain", "total", "out")),
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class NormChangeStruct(ctypes.Structure):
    """The struct `NormChange` of native/rowwise.hpp."""

    _fields_ = (
        *((name, ADDRESS) for name in ("rows", "gain", "out", "total", "change", "gains")),
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class GateStruct(ctypes.Structure):
    """The struct `Gate` of native/rowwise.hpp."""

    _fields_ = (
        *((name, ADDRESS) for name in ("gate", "up", "change", "out", "to_up")),
        ("count", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


class TurnStruct(ctypes.Structure):
    """The struct `Turn` of native/rowwise.hpp."""

    _fields_ = (
        *((name, ADDRESS) for name in ("rows", "cosines", "sines", "out")),
        ("tokens", ctypes.c_int64),
        ("angles", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("turned", ctypes.c_int32),
        ("sign", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class LossesStruct(ctypes.Structure):
    """The struct `Losses` of native/rowwise.hpp."""

    _fields_ = (
        *((name, ADDRESS) for name in ("logits", "ids", "losses")),
        ("count", ctypes.c_int64),
        ("ignored", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("vocabulary", "gradients", "threads")),
    )


def _at(part: Tensor | None) -> int | None:
    return None if part is None else part.data_ptr()


class Norm(torch.autograd.Function):
    """The sum of rows [..., width] and `added`, if given, and its RMSNorm with a gain [width]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, added: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
        """Run the forward kernel; only the rows that are normalised are saved."""
        total, out = None if added is None else torch.empty_like(rows), torch.empty_like(rows)
        width = rows.shape[-1]
        sizes = rows.numel() // width, width, eps, torch.get_num_threads()
        struct = NormStruct(rows.data_ptr(), _at(added), gain.data_ptr(), _at(total), out.data_ptr(), *sizes)
        library().attn_norm(ctypes.byref(struct))
        ctx.save_for_backward(rows if total is None else total, gain)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, total: Tensor | None, out: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of both summands, which are the same, and of the gain."""
        if out is None:
            return total, total, None, None
        rows, gain = ctx.saved_tensors
        width = rows.shape[-1]
        count = rows.numel() // width
        out, total = out.contiguous(), None if total is None else total.contiguous()
        change = torch.empty_like(rows)
        gains = torch.zeros(-(-count // ROWS_OF_A_GAIN), width) if ctx.needs_input_grad[2] else None
        given = rows.data_ptr(), gain.data_ptr(), out.data_ptr(), _at(total)
        struct = NormChangeStruct(*given, change.data_ptr(), _at(gains), count, width, ctx.eps, torch.get_num_threads())
        library().attn_norm_changes(ctypes.byref(struct))
        return change, change if ctx.needs_input_grad[1] else None, None if gains is None else gains.sum(0), None


class Gated(torch.autograd.Function):
    """f(gate) ⊙ up of rows of one shape, which are all that is saved for the gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, form: Activation) -> Tensor:
        """Run the forward kernel."""
        out = torch.empty_like(gate)
        struct = GateStruct(
            gate.data_ptr(), up.data_ptr(), None, out.data_ptr(), None, gate.numel(), torch.get_num_threads()
        )
        library().attn_gate(FORMS.index(form), ctypes.byref(struct))
        ctx.save_for_backward(gate, up)
        ctx.form = form
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, Tensor, None]:
        """Run the backward kernel, which computes f again."""
        gate, up = ctx.saved_tensors
        change, to_gate, to_up = change.contiguous(), torch.empty_like(gate), torch.empty_like(up)
        parts = (part.data_ptr() for part in (gate, up, change, to_gate, to_up))
        library().attn_gate(
            FORMS.index(ctx.form), ctypes.byref(GateStruct(*parts, gate.numel(), torch.get_num_threads()))
        )
        return to_gate, to_up, None


class Turned(torch.autograd.Function):
    """Rotary positions of rows [..., heads, size], by angles [tokens, turned] that repeat for each sequence."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotate by the angles."""
        ctx.save_for_backward(cosines, sines)
        return turned(rows, cosines, sines, 1.0)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, None, None]:
        """Rotate the gradient back."""
        cosines, sines = ctx.saved_tensors
        return turned(change.contiguous(), cosines, sines, -1.0), None, None


def turned(rows: Tensor, cosines: Tensor, sines: Tensor, sign: float) -> Tensor:
    """Contiguous rows [..., heads, size] rotated by the angles, with sines times `sign`."""
    out, (heads, size) = torch.empty_like(rows), rows.shape[-2:]
    parts = (part.data_ptr() for part in (rows, cosines, sines, out))
    sizes = rows.numel() // max(1, heads * size), len(cosines), heads, size, cosines.shape[-1]
    library().attn_turn(ctypes.byref(TurnStruct(*parts, *sizes, sign, torch.get_num_threads())))
    return out


def norm(rows: Tensor, gain: Tensor | None, eps: float) -> Tensor | None:
    """See `NormKernel.norm`."""
    if not readable(rows, gain):
        return None
    gain = rows.new_ones(rows.shape[-1]) if gain is None else gain.contiguous()
    return cast("Tensor", Norm.apply(rows.contiguous(), None, gain, eps)[1])  # type: ignore[no-untyped-call]


def norm_sum(rows: Tensor, added: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor] | None:
    """See `NormKernel.norm_sum`."""
    if not readable(rows, added, gain) or rows.shape != added.shape:
        return None
    gain = rows.new_ones(rows.shape[-1]) if gain is None else gain.contiguous()
    found = Norm.apply(rows.contiguous(), added.contiguous(), gain, eps)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor]", found)


def gated(gate: Tensor, up: Tensor, form: Activation) -> Tensor | None:
    """See `GateKernel.gated`."""
    if not readable(gate, up) or gate.shape != up.shape:
        return None
    return cast("Tensor", Gated.apply(gate.contiguous(), up.contiguous(), form))  # type: ignore[no-untyped-call]


def rotate(rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor | None:
    """See `RotaryKernel.rotate`, for pairs of halves."""
    if not readable(rows, cosines, sines):
        return None
    angles = (part.contiguous().view(-1, part.shape[-1]) for part in (cosines, sines))
    return cast("Tensor", Turned.apply(rows.contiguous(), *angles))  # type: ignore[no-untyped-call]


def losses(logits: Tensor, ids: Tensor, targets: Targets, *, gradients: bool) -> Tensor | None:
    """See `CrossEntropyKernel.losses`; None with label smoothing or a cap, too."""
    if not readable(logits) or targets.smoothing or targets.cap is not None or not logits.is_contiguous():
        return None
    found, ids = torch.empty(len(logits)), ids.contiguous()
    parts = (part.data_ptr() for part in (logits, ids, found))
    sizes = len(logits), targets.ignored, logits.shape[1], gradients, torch.get_num_threads()
    library().attn_losses(ctypes.byref(LossesStruct(*parts, *sizes)))
    return found
