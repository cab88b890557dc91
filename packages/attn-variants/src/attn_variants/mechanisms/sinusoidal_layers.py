"""Layers that add sinusoids of positions, or of depths in a tree."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from functools import lru_cache
from typing import cast

import torch
from attn_core import AttentionInputs, Fields, LayerState, RaggedBatch
from attn_core.kernels.linear import Pack
from attn_core.masking import positions as positions_of
from attn_core.modifiers import DependencyTree
from attn_core.rotary import sinusoidal
from torch import Tensor, nn

from attn_variants.compute.dependency import depth_of, depths_of
from attn_variants.compute.kept import in_trace
from attn_variants.spec_layer import SpecLayer

SHORTEST_TABLE = 256


def sinusoidal_at(positions: Tensor, size: int, like: Tensor, longest: int | None = None) -> Tensor:
    """PE [..., size] of positions [...] from 0, int64, in the type of `like`; all are below `longest`, for which the
    device is asked where it is None."""
    if in_trace() or positions.numel() == 0:
        return sinusoidal(positions, size).to(like)
    farthest = int(positions.max()) if longest is None else longest - 1
    length = max(SHORTEST_TABLE, 1 << farthest.bit_length())
    return _table(length, size, like.dtype, positions.device)[positions]


@lru_cache(maxsize=32)
def _table(length: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return sinusoidal(torch.arange(length), size).to(device, dtype)


class SinusoidalLayer(SpecLayer):
    """Sinusoids of the size of a head for queries, keys and values, the same in every head.

    Keys and values are cached, and shared between layers, without positions.
    """

    def use_kernel(self, name: str | None) -> None:
        """As of any spec, but without kernels for paged rows: those hold keys and values without positions."""
        super().use_kernel(name)
        self._paged = None
        self.last_needs_positions = True

    def operands(
        self,
        query: Tensor,
        fields: Fields,
        key_padding_mask: Tensor | None = None,
        positions: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> AttentionInputs:
        """The inputs of attention with sinusoids in queries, keys and values; arguments as of `SpecLayer.operands`."""
        plain = super().operands(query, fields, key_padding_mask, positions)
        at_query, at_key = positions_of(plain)
        key = self._with_sinusoids(plain.key, at_key)
        return dataclasses.replace(
            plain,
            query=self._with_sinusoids(plain.query, at_query),
            key=key,
            value=self._with_sinusoids(plain.value, at_key),
        )

    @abstractmethod
    def combine(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """Rows [batch, row, heads, size] combined with sinusoids [batch or 1, row, 1, size]."""

    def _with_sinusoids(self, rows: Tensor, at: Tensor) -> Tensor:
        return self.combine(rows, sinusoidal_at(at, rows.shape[-1], rows)[:, :, None])


class AddedPositionsLayer(SinusoidalLayer):
    """Sinusoids p are added: q + p, k + p, v + p."""

    def combine(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """The sums."""
        return rows + vectors


class ConcatenatedPositionsLayer(SinusoidalLayer):
    """Sinusoids p are concatenated: [q; p], [k; p], [v; p], twice the size of the projections."""

    def combine(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """The concatenation, [batch, row, heads, 2 size]."""
        return torch.cat([rows, vectors.expand_as(rows)], dim=-1)


class DepthLayer(nn.Module):
    """`attention` over x_i + tanh(U PE(i) + W PE(δ_i)), δ_i the depth of token i in the tree.

    Learned: `sequential` U and `structural` W (`nn.Linear` without bias), and what `attention` has.
    """

    def __init__(self, attention: SpecLayer, tree: DependencyTree, *, hidden_size: int) -> None:
        super().__init__()
        self.attention = attention
        self.tree = tree
        self.hidden_size = hidden_size
        self.sequential: nn.Module = nn.Linear(hidden_size, hidden_size, bias=False)
        self.structural: nn.Module = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attend over whole sequences [batch, tokens, hidden_size]; arguments as of `SpecLayer.forward`."""
        out: Tensor = self.attention(
            self._at_positions(query), source, key_padding_mask=key_padding_mask, shared_kv=shared_kv
        )
        return out

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; arguments as of `forward`."""
        return self.attention.weights(
            self._at_positions(query), source, key_padding_mask=key_padding_mask, shared_kv=shared_kv
        )

    def project_kv(self, query: Tensor) -> Fields:
        """Keys and values [batch, key, num_kv_heads, size] of whole sequences [batch, key, hidden_size]."""
        return self.attention.project_kv(self._at_positions(query))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, hidden_size] of many requests; returns [tokens, hidden_size]."""
        return self.attention.step(self.with_sinusoids(query, batch.positions, batch.longest), batch, state)

    def with_sinusoids(self, rows: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Rows [..., tokens, hidden_size] at positions [tokens] below `longest` with their place."""
        depths = depth_of(positions, depths_of(self.tree, rows.device))
        # A token of the parse is no deeper than it has tokens, one behind it no deeper than its position says.
        deepest = max(longest, len(self.tree.heads))
        sequence = self.sequential(sinusoidal_at(positions, self.hidden_size, rows, longest))
        return rows + torch.tanh(sequence + self.structural(sinusoidal_at(depths, self.hidden_size, rows, deepest)))

    def pack(self, pack: Pack) -> None:
        """Pack the projections for serving."""
        self.attention.pack(pack)
        self.sequential = pack([cast("nn.Linear", self.sequential)])
        self.structural = pack([cast("nn.Linear", self.structural)])

    def use_kernel(self, name: str | None) -> None:
        """Compute with the kernel of this name from now on; None chooses the cheapest that accepts."""
        self.attention.use_kernel(name)

    def _at_positions(self, rows: Tensor) -> Tensor:
        return self.with_sinusoids(rows, torch.arange(rows.shape[-2], device=rows.device), rows.shape[-2])
