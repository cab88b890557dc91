"""The layer of retention."""

from __future__ import annotations

import torch
from attn_core import Heads, Rotary
from attn_core.pairs import wide
from torch import Tensor
from torch.nn.functional import silu

from attn_variants.compute.rotary import rotate, rotated_size, turns
from attn_variants.recurrences.layer import Inputs, RecurrenceLayer
from attn_variants.recurrences.numbers import by_heads, fresh_linear, rms_normed
from attn_variants.recurrences.steps import Steps

EPSILON = 1e-6


class RetentionLayer(RecurrenceLayer):
    """Retention (Sun et al. 2023, arXiv 2307.08621, equations 5 to 8). Learned beside the projections: `gate`."""

    def __init__(self, heads: Heads, *, width: int, bias: bool, chunk: int, rotary: Rotary | None) -> None:
        super().__init__(heads, width=width, bias=bias, chunk=chunk)
        self.rotary = rotary
        self.rotated = rotated_size(rotary, heads.key_size) if rotary else 0
        self.gate = fresh_linear(width, heads.query * heads.value_size, bias=False)

    def steps(self, inputs: Inputs) -> Steps:
        """Queries and keys turned to their positions, keys over √key_size, and the fixed decay."""
        query, key = inputs.query, inputs.key
        if self.rotary is not None:
            kind = torch.float64 if query.dtype == torch.float64 else torch.float32
            turn = turns(self.rotary, self.rotated, inputs.positions, kind)
            query, key = (rotate(rows, turn, interleaved=self.rotary.interleaved) for rows in (query, key))
        query, key, value = wide(query), wide(key) * self.heads.key_size**-0.5, wide(inputs.value)
        return Steps(query, key, value, log_retention(self.heads.query, key)[None, None].expand(1, key.shape[1], -1, 1))

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Each head normed, gated and projected."""
        gate = by_heads(silu(wide(self.gate(rows))), self.heads.query)
        return super().finish(rms_normed(out, None, EPSILON) * gate, rows)


def log_retention(heads: int, like: Tensor) -> Tensor:
    """ln(1 - 2^(-5 - h)) of every head h from 0, [heads, 1], in the type and on the device of `like`."""
    exponents = -5.0 - torch.arange(heads, dtype=torch.float64, device=like.device)
    return torch.log1p(-torch.exp2(exponents))[:, None].to(like.dtype)
