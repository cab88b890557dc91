"""Queries and keys of one length."""

from __future__ import annotations

import torch
from attn_core import QkL2Norm, QkNorm
from torch import Tensor


def normed(rows: Tensor, gain: Tensor | None, norm: QkNorm) -> Tensor:
    """x / rms(x) · gain, or x / ‖x‖ · gain, over the last axis of rows [..., key_size], in their type.

    Computed in at least float32; no `gain` is a gain of one.
    """
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    squares = wide.square()
    size = squares.sum(-1, keepdim=True) if isinstance(norm, QkL2Norm) else squares.mean(-1, keepdim=True)
    scaled = wide * torch.rsqrt(size + norm.eps)
    return (scaled if gain is None else scaled * gain).to(rows.dtype)
