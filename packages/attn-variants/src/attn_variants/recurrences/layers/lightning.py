"""The layer of lightning attention."""

from __future__ import annotations

import torch
from attn_core import Heads
from attn_core.kernels.recurrence import Steps
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import silu

from attn_variants.recurrences.layer import Inputs, RecurrenceLayer
from attn_variants.recurrences.numbers import by_heads, rms_normed

EPSILON = 1e-6


class LightningLayer(RecurrenceLayer):
    """Lightning attention (Qin et al. 2024, arXiv 2401.04658), with the features of MiniMax-01 (2501.08313).

    Learned beside the projections: `norm` [heads · value_size].
    """

    def __init__(self, heads: Heads, *, width: int, bias: bool, chunk: int) -> None:
        super().__init__(heads, width=width, bias=bias, chunk=chunk)
        self.norm = nn.Parameter(torch.ones(heads.query * heads.value_size))

    def steps(self, inputs: Inputs) -> Steps:
        """SiLU of queries, keys and values, and the fixed decay."""
        query, key, value = (silu(wide(rows)) for rows in (inputs.query, inputs.key, inputs.value))
        decay = -slopes_of(self.heads.query, key)
        return Steps(query, key, value, decay[None, None].expand(1, key.shape[1], -1, 1))

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """All heads normed as one row, and projected."""
        return super().finish(by_heads(rms_normed(out.flatten(-2), self.norm, EPSILON), self.heads.query), rows)


def slopes_of(heads: int, like: Tensor) -> Tensor:
    """The slope 2^(-8h/H) of every head h from 1, [heads, 1], in the type and on the device of `like`."""
    exponents = torch.arange(1, heads + 1, dtype=torch.float64, device=like.device) * (-8.0 / heads)
    return torch.exp2(exponents)[:, None].to(like.dtype)
