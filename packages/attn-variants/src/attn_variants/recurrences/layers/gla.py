"""The layer of gated linear attention."""

from __future__ import annotations

import torch
from attn_core import Heads
from attn_core.kernels.recurrence import Steps
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, silu

from attn_variants.recurrences.layer import Inputs, RecurrenceLayer
from attn_variants.recurrences.numbers import by_heads, fresh_linear, rms_normed

EPSILON = 1e-5


class GatedLinearLayer(RecurrenceLayer):
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635, §4.4).

    Learned beside the projections: `fade` (two `nn.Linear`, the second with a bias), `gate` and `norm` [value_size].
    """

    def __init__(self, heads: Heads, *, width: int, bias: bool, chunk: int, rank: int, temperature: float) -> None:
        super().__init__(heads, width=width, bias=bias, chunk=chunk)
        self.temperature = temperature
        self.fade = nn.Sequential(
            fresh_linear(width, rank, bias=False), fresh_linear(rank, heads.query * heads.key_size, bias=True)
        )
        self.gate = fresh_linear(width, heads.query * heads.value_size, bias=False)
        self.norm = nn.Parameter(torch.ones(heads.value_size))

    def steps(self, inputs: Inputs) -> Steps:
        """Queries over √key_size, and the log of every channel's gate."""
        decay = logsigmoid(wide(self.fade(inputs.rows))) / self.temperature
        query = wide(inputs.query) * self.heads.key_size**-0.5
        return Steps(query, wide(inputs.key), wide(inputs.value), by_heads(decay, self.heads.query))

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Each head normed, gated and projected."""
        gate = by_heads(silu(wide(self.gate(rows))), self.heads.query)
        return super().finish(rms_normed(out, self.norm, EPSILON) * gate, rows)
