"""The gated unit of a decoder that is shown a context at every step."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.kernels.linear import Pack
from torch import Tensor, nn


class GatedCell(nn.Module):
    """z, r = σ(W x + U s + C c); s̃ = tanh(W x + U (r ∘ s) + C c); s' = (1 - z) ∘ s + z ∘ s̃.

    Bahdanau et al. 2015, appendix A.2.2. U is drawn orthogonal as there; the reset gate acts before U, which
    `torch.nn.GRUCell` has the other way round.
    """

    def __init__(self, inputs: int, context: int, width: int) -> None:
        super().__init__()
        # Any: packed modules where weights are packed.
        self.inward: Any = nn.Linear(inputs, 3 * width)
        self.shown: Any = nn.Linear(context, 3 * width, bias=False)
        self.gates: Any = nn.Linear(width, 2 * width, bias=False)
        self.candidate: Any = nn.Linear(width, width, bias=False)
        for part in (*self.gates.weight.chunk(2), self.candidate.weight):
            nn.init.orthogonal_(part)

    def pack(self, pack: Pack) -> None:
        """Pack the matrices for serving."""
        self.inward, self.shown = pack([self.inward]), pack([self.shown])
        self.gates, self.candidate = pack([self.gates]), pack([self.candidate])

    def forward(self, inputs: Tensor, state: Tensor, context: Tensor) -> Tensor:
        """The next state [batch, width]."""
        update, reset, fresh = (self.inward(inputs) + self.shown(context)).chunk(3, dim=-1)
        update_state, reset_state = self.gates(state).chunk(2, dim=-1)
        kept = torch.sigmoid(reset + reset_state) * state
        proposed = torch.tanh(fresh + self.candidate(kept))
        return torch.lerp(state, proposed, torch.sigmoid(update + update_state))
