"""Rotary positions of index heads."""

from __future__ import annotations

import torch
from attn_core import Rotary
from torch import Tensor


def turn(rows: Tensor, positions: Tensor, rotary: Rotary, turned: int) -> Tensor:
    """Rows [batch, token, heads, size] with the first `turned` elements turned to positions [batch or 1, token].

    Element i meets element i + turned / 2, as in the indexer of DeepSeek-V3.2, whatever the pairing of the keys is.
    """
    frequencies = torch.tensor(rotary.frequencies(turned), dtype=torch.float64, device=rows.device)
    angles = positions.to(torch.float64)[..., None, None] * frequencies
    factor = rotary.attention_factor
    cosines, sines = (angles.cos() * factor).to(rows.dtype), (angles.sin() * factor).to(rows.dtype)
    first, second = rows[..., :turned].chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rows[..., turned:]], dim=-1)
