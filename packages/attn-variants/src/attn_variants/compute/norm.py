"""Queries and keys of one length."""

from __future__ import annotations

import torch
from attn_core import QkNorm
from torch import Tensor


def normed(rows: Tensor, gain: Tensor, norm: QkNorm) -> Tensor:
    """x / rms(x) · gain over the last axis of rows [..., key_size], in their type; computed in at least float32."""
    wide = rows.float() if rows.dtype in {torch.float16, torch.bfloat16} else rows
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return (scaled * gain).to(rows.dtype)
