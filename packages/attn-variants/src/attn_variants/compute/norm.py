"""Rows of one length: queries and keys, latents, and what recurrences read."""

from __future__ import annotations

import torch
from attn_core.kernels.rowwise import NormKernel, row_kernel
from attn_core.norms import QkL2Norm, QkNorm, QkNormAllHeads
from torch import Tensor, nn


class RmsNorm(nn.RMSNorm):
    """torch's RMSNorm, computed by a kernel where one accepts."""

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] to [..., width], in the rows' type."""
        kernel = norm_kernel(rows, self.weight) if self.eps is not None else None
        return super().forward(rows) if kernel is None else kernel.norm(rows, self.weight, self.eps or 0.0)


def normed(rows: Tensor, gain: Tensor | None, norm: QkNorm) -> Tensor:
    """x / rms(x) · gain, or x / ‖x‖ · gain, over the last axis of rows [..., heads, key_size], or over both, in their
    type.

    Computed in at least float32; no `gain` is a gain of one.
    """
    if isinstance(norm, QkNormAllHeads):
        return normed(rows.flatten(-2), gain, QkNorm(eps=norm.eps)).view_as(rows)
    kernel = None if isinstance(norm, QkL2Norm) else norm_kernel(rows, gain)
    if kernel is not None:
        return kernel.norm(rows, gain, norm.eps)
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    squares = wide.square()
    size = squares.sum(-1, keepdim=True) if isinstance(norm, QkL2Norm) else squares.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(size + norm.eps)
    return (scaled if gain is None else scaled * gain).to(rows.dtype)


def norm_kernel(rows: Tensor, gain: Tensor | None) -> NormKernel | None:
    """What norms these rows; None where the plain computation is as good."""
    return None if torch.compiler.is_compiling() else row_kernel(NormKernel, "plain", rows, gain)
