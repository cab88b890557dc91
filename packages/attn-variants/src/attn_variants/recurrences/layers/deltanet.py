"""The layer of DeltaNet."""

from __future__ import annotations

import torch
from attn_core import Heads
from attn_core.kernels.recurrence import Steps
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import silu

from attn_variants.recurrences.layer import Inputs, RecurrenceLayer
from attn_variants.recurrences.numbers import fresh_linear, rms_normed, unit

EPSILON = 1e-5


class DeltaLayer(RecurrenceLayer):
    """DeltaNet (Yang et al. 2024, arXiv 2406.06484, §3.4).

    Learned beside the projections: `convolution`, `strength` (`nn.Linear` to one number a head) and `norm`
    [value_size].
    """

    def __init__(self, heads: Heads, *, width: int, bias: bool, chunk: int, taps: int) -> None:
        super().__init__(heads, width=width, bias=bias, chunk=chunk, taps=taps)
        self.strength = fresh_linear(width, heads.query, bias=False)
        self.norm = nn.Parameter(torch.ones(heads.value_size))

    def steps(self, inputs: Inputs) -> Steps:
        """Queries and keys of length one, queries over √key_size, and the strength of every write."""
        query, key, value = (wide(rows) for rows in (inputs.query, inputs.key, inputs.value))
        if self.convolution is None:
            # The convolution has it already.
            query, key, value = silu(query), silu(key), silu(value)
        strength = torch.sigmoid(wide(self.strength(inputs.rows)))
        return Steps(unit(query) * self.heads.key_size**-0.5, unit(key), value, strength=strength)

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """Each head normed, and projected."""
        return super().finish(rms_normed(out, self.norm, EPSILON), rows)
