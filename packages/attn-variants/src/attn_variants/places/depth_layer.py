"""The layer whose inputs are given their place in a sentence and in its tree."""

from __future__ import annotations

from typing import cast

import torch
from attn_core import Fields, LayerState, RaggedBatch
from attn_core.kernels.linear import Pack
from attn_core.modifiers import DependencyTree
from torch import Tensor, nn

from attn_variants.compute.dependency import depth_of, depths_of
from attn_variants.places.sinusoids import sinusoidal_at
from attn_variants.spec_layer import SpecLayer


class DepthLayer(nn.Module):
    """`attention` over x_i + tanh(U PE(i) + W PE(δ_i)), δ_i the depth of token i in the tree.

    Learned: `sequential` U and `structural` W (`nn.Linear` without bias), and what `attention` has.
    """

    def __init__(self, attention: SpecLayer, tree: DependencyTree, *, width: int) -> None:
        super().__init__()
        self.attention = attention
        self.tree = tree
        self.width = width
        self.sequential: nn.Module = nn.Linear(width, width, bias=False)
        self.structural: nn.Module = nn.Linear(width, width, bias=False)

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        borrowed: Fields | None = None,
    ) -> Tensor:
        """Attend over whole sequences [batch, tokens, width]; arguments as of `SpecLayer.forward`."""
        out: Tensor = self.attention(self._counted(query), source, key_padding_mask=key_padding_mask, borrowed=borrowed)
        return out

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        borrowed: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; arguments as of `forward`."""
        return self.attention.weights(
            self._counted(query), source, key_padding_mask=key_padding_mask, borrowed=borrowed
        )

    def lend(self, query: Tensor) -> Fields:
        """Keys and values [batch, key, key_value_heads, size] of whole sequences [batch, key, width]."""
        return self.attention.lend(self._counted(query))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; returns [tokens, width]."""
        return self.attention.step(self.placed(query, batch.positions), batch, state)

    def placed(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rows [..., tokens, width] at positions [tokens] with their place."""
        depths = depth_of(positions, depths_of(self.tree, rows.device))
        sequence = self.sequential(sinusoidal_at(positions, self.width, rows))
        return rows + torch.tanh(sequence + self.structural(sinusoidal_at(depths, self.width, rows)))

    def pack(self, pack: Pack) -> None:
        """Pack the projections for serving."""
        self.attention.pack(pack)
        self.sequential = pack([cast("nn.Linear", self.sequential)])
        self.structural = pack([cast("nn.Linear", self.structural)])

    def use_kernel(self, name: str | None) -> None:
        """Compute with the kernel of this name from now on; None chooses the cheapest that accepts."""
        self.attention.use_kernel(name)

    def _counted(self, rows: Tensor) -> Tensor:
        return self.placed(rows, torch.arange(rows.shape[-2], device=rows.device))
