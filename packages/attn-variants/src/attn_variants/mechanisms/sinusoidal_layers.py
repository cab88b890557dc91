"""Layers with sinusoidal encodings of positions, or of depths in a dependency tree."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import cast

import torch
from attn_core import AttentionInputs, Fields, LayerState, RaggedBatch
from attn_core.graph_safety import device_cache
from attn_core.kernels.linear import Pack
from attn_core.masking import positions as positions_of
from attn_core.modifiers import DependencyTree
from attn_core.rotary import sinusoidal
from torch import Tensor, nn

from attn_variants.attention.layer import SpecLayer
from attn_variants.compute.constants import in_trace
from attn_variants.compute.dependency import ParsedSentences, depth_of, depths_of

SHORTEST_TABLE = 256


def sinusoidal_at(positions: Tensor, size: int, like: Tensor, longest: int | None = None) -> Tensor:
    """Sinusoids PE [..., size] of positions [...], int64, in the dtype of `like`.

    All positions are below `longest`; if it is None, the largest is read from the device."""
    if in_trace() or positions.numel() == 0 or positions.is_meta:
        return sinusoidal(positions, size).to(like)
    farthest = int(positions.max()) if longest is None else longest - 1
    length = max(SHORTEST_TABLE, 1 << farthest.bit_length())
    return _table(length, size, like.dtype, positions.device)[positions]


@device_cache(32)
def _table(length: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return sinusoidal(torch.arange(length), size).to(device, dtype)


class SinusoidalLayer(SpecLayer):
    """Base class of layers that combine queries, keys and values of every head with sinusoids of the head size.

    Keys and values are cached, and shared between layers, without positions.
    """

    only_spec = False
    own_positions = True

    def use_kernel(self, name: str | None) -> None:
        """See `SpecLayer.use_kernel`; kernels that read the cache in place are not used, as it has no positions."""
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
        """The inputs of attention, with sinusoids in queries, keys and values; see `SpecLayer.operands`."""
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
        """Combine rows [batch, row, heads, size] with sinusoids `vectors` [batch or 1, row, 1, size]."""

    def _with_sinusoids(self, rows: Tensor, at: Tensor) -> Tensor:
        return self.combine(rows, sinusoidal_at(at, rows.shape[-1], rows)[:, :, None])


class AddedPositionsLayer(SinusoidalLayer):
    """Adds sinusoids p: q + p, k + p, v + p."""

    def combine(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """The sums."""
        return rows + vectors


class ConcatenatedPositionsLayer(SinusoidalLayer):
    """Concatenates sinusoids p: [q; p], [k; p], [v; p], twice the size of the projections."""

    def combine(self, rows: Tensor, vectors: Tensor) -> Tensor:
        """The concatenation, [batch, row, heads, 2 size]."""
        return torch.cat([rows, vectors.expand_as(rows)], dim=-1)


class DepthLayer(nn.Module):
    """`attention` over x_i + tanh(U PE(i) + W PE(δ_i)), where δ_i is the depth of token i in the tree.

    Learned: `sequential` U and `structural` W (`nn.Linear` without bias), and the parameters of `attention`.
    """

    takes_parses = True

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
        parses: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size]; see `SpecLayer.forward`, and
        `DependencyLayer.forward` for `parses`."""
        rows = self._at_positions(query, parses, key_padding_mask)
        out: Tensor = self.attention(rows, source, key_padding_mask=key_padding_mask, shared_kv=shared_kv)
        return out

    def weights(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        shared_kv: Fields | None = None,
        parses: Tensor | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        rows = self._at_positions(query, parses, key_padding_mask)
        return self.attention.weights(rows, source, key_padding_mask=key_padding_mask, shared_kv=shared_kv)

    def project_kv(self, query: Tensor) -> Fields:
        """Keys and values [batch, key, num_kv_heads, size] of whole sequences [batch, key, hidden_size]."""
        return self.attention.project_kv(self._at_positions(query))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape."""
        return self.attention.step(self.with_sinusoids(query, batch.positions, batch.longest), batch, state)

    def with_sinusoids(
        self, rows: Tensor, positions: Tensor, longest: int, sentences: ParsedSentences | None = None
    ) -> Tensor:
        """Add the encodings of `positions` [tokens], all below `longest`, to rows [..., tokens, hidden_size]."""
        if sentences is None or sentences.sentence_depths is None:
            depths = depth_of(positions, depths_of(self.tree, rows.device))
        else:
            depths = sentences.sentence_depths
        # Depths are below the number of tokens of the parse and, after the parse, at most the token's position.
        deepest = max(longest, len(self.tree.heads))
        sequence = self.sequential(sinusoidal_at(positions, self.hidden_size, rows, longest))
        return rows + torch.tanh(sequence + self.structural(sinusoidal_at(depths, self.hidden_size, rows, deepest)))

    def pack(self, pack: Pack) -> None:
        """Pack the projections for serving."""
        self.attention.pack(pack)
        self.sequential = pack([cast("nn.Linear", self.sequential)])
        self.structural = pack([cast("nn.Linear", self.structural)])

    def use_kernel(self, name: str | None) -> None:
        """Use the kernel of this name from now on; None chooses the cheapest that supports each call."""
        self.attention.use_kernel(name)

    def _at_positions(
        self, rows: Tensor, parses: Tensor | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        sentences = None if parses is None else ParsedSentences.of(parses, rows, key_padding_mask)
        return self.with_sinusoids(rows, torch.arange(rows.shape[-2], device=rows.device), rows.shape[-2], sentences)
