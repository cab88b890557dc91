"""RMS and L2 normalisation of queries, keys, latents, and the outputs of recurrences."""

from __future__ import annotations

import torch
from attn_core.kernels.base import batch_invariant
from attn_core.kernels.rowwise import NormKernel, row_result
from attn_core.norms import QkL2Norm, QkNorm, QkNormAllHeads
from torch import Tensor, nn
from torch.nn import functional


class RmsNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by a fused kernel if one supports the call."""

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise rows [..., width], in their dtype."""
        found = None if self.eps is None else fused_norm(rows, self.weight, self.eps)
        return super().forward(rows) if found is None else found


def normed(rows: Tensor, gain: Tensor | None, norm: QkNorm) -> Tensor:
    """x / rms(x) · gain, or x / ‖x‖ · gain for `QkL2Norm`, of rows [..., heads, key_size], in their dtype.

    Over the last axis, or over the last two for `QkNormAllHeads`. Computed in at least float32; no `gain` is a gain of
    one.
    """
    if isinstance(norm, QkNormAllHeads):
        return normed(rows.flatten(-2), gain, QkNorm(eps=norm.eps)).view_as(rows)
    found = None if isinstance(norm, QkL2Norm) else fused_norm(rows, gain, norm.eps)
    if found is not None:
        return found
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    if batch_invariant() and not isinstance(norm, QkL2Norm):
        scaled = functional.rms_norm(wide, wide.shape[-1:], None, norm.eps)
        return (scaled if gain is None else scaled * gain).to(rows.dtype)
    squares = wide.square()
    size = squares.sum(-1, keepdim=True) if isinstance(norm, QkL2Norm) else squares.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(size + norm.eps)
    return (scaled if gain is None else scaled * gain).to(rows.dtype)


def fused_norm(rows: Tensor, gain: Tensor | None, eps: float) -> Tensor | None:
    """RMSNorm of rows by a fused kernel; None if none is faster than the plain computation."""
    if torch.compiler.is_compiling():
        return None
    return row_result(NormKernel, "plain", lambda kernel: kernel.norm(rows, gain, eps), rows, gain)


def unit(rows: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Rows [..., size] scaled to L2 norm one; zeros stay zeros, as `epsilon` is added to the squared norm."""
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + epsilon)


def rms_normed(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMSNorm of rows [..., size], times `weight` [size] if given (Zhang & Sennrich 2019)."""
    found = fused_norm(rows, weight, epsilon)
    if found is not None:
        return found
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + epsilon)
    return normed if weight is None else normed * weight.to(rows.dtype)
