"""The layer of disentangled attention."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.masking import of_query_heads, positions, wide
from torch import Tensor, nn

from attn_variants.attention.kernels import AttentionKernels
from attn_variants.attention.layer import SpecLayer
from attn_variants.attention.projections import by_heads, fresh_linear
from attn_variants.compute import plain
from attn_variants.mechanisms.disentangled_options import DisentangledConfig
from attn_variants.scores import scale_of
from attn_variants.tensor_masks import TensorBias


class PositionVectors(nn.Module):
    """The vectors of relative positions, normalised if `norm_eps` is given; `table` is learned, [vectors, width]."""

    def __init__(self, vectors: int, width: int, norm_eps: float | None) -> None:
        super().__init__()
        self.table = nn.Embedding(vectors, width)
        nn.init.normal_(self.table.weight, std=0.02)
        self.norm = None if norm_eps is None else nn.LayerNorm(width, eps=norm_eps)

    def forward(self) -> Tensor:
        """The vectors [vectors, width]."""
        found: Tensor = self.table.weight if self.norm is None else self.norm(self.table.weight)
        return found


class DisentangledLayer(SpecLayer):
    """A `SpecLayer` whose scores add products of queries, and of keys, with vectors of relative positions.

    Learned: `vectors`, and the projections `position_key` and `position_query` if these are separate.
    """

    only_spec = False
    own_positions = True
    computes_itself = True

    def __init__(self, spec: AttentionSpec, options: DisentangledConfig) -> None:
        width, bias = options.hidden_size, options.bias
        super().__init__(spec, hidden_size=width, bias=bias, dropout=options.dropout)
        heads, vectors = spec.heads, 2 * options.span
        self.options = options
        self.vectors = PositionVectors(vectors, width, options.norm_eps)
        self.position_key: Any = None
        self.position_query: Any = None
        if options.separate and options.query_positions:
            self.position_key = fresh_linear(width, heads.key_value * heads.key_size, bias=bias)
        if options.separate and options.key_positions:
            self.position_query = fresh_linear(width, heads.query * heads.key_size, bias=bias)

    def _attend(self, rows: Tensor, operands: AttentionInputs, kernels: AttentionKernels) -> Tensor:  # noqa: ARG002 -- computed here
        return plain.attend(self.with_positions(operands), operands)

    def weights(
        self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        operands = self._operands(query, source, key_padding_mask, **others)
        return plain.attention_weights(self.with_positions(operands), operands)

    def with_positions(self, operands: AttentionInputs) -> AttentionSpec:
        """The spec with the products of positions as a bias of its scores."""
        heads, options, vectors = self.spec.heads, self.options, self.vectors()
        query, key = positions(operands)
        rows = bucket(query[:, :, None] - key[:, None], options.buckets, options.max_distance)
        rows = (rows + options.span).clamp(0, 2 * options.span - 1)[:, None]
        scores = []
        if options.query_positions:
            keys = self.split((self.position_key or cast("nn.Module", self.key))(vectors), heads.key_value)
            scores.append(products(operands.query, of_query_heads(heads, keys), rows))
        if options.key_positions:
            queries = self.split((self.position_query or self.query)(vectors), heads.query)
            own = of_query_heads(heads, operands.key.transpose(1, 2)).transpose(1, 2)
            scores.append(products(own, queries, rows.transpose(-1, -2)).transpose(-1, -2))
        bias = TensorBias(torch.stack(scores).sum(0) * scale_of(self.spec.score, heads.key_size))
        return dataclasses.replace(self.spec, modifiers=(bias,))

    def split(self, rows: Tensor, heads: int) -> Tensor:
        """Rows [vectors, heads x size] as [1, heads, vectors, size]."""
        return by_heads(rows, heads).transpose(0, 1)[None]


def products(rows: Tensor, vectors: Tensor, chosen: Tensor) -> Tensor:
    """Products [batch, heads, row, other] of rows [batch, row, heads, size] and those of vectors [1, heads, vectors,
    size] that are `chosen` [batch or 1, 1, row, other]."""
    found = wide(rows).transpose(1, 2) @ wide(vectors).transpose(-1, -2)
    return found.gather(-1, chosen.expand(*found.shape[:-1], -1))


def bucket(distance: Tensor, buckets: int | None, longest: int) -> Tensor:
    """The bucket, int64, of each distance: itself up to half of the buckets, then of logarithmic width.

    It is computed in float32, as checkpoints were trained: a distance on the edge of two buckets must fall on the same
    side.
    """
    if buckets is None:
        return distance
    half = buckets // 2
    sizes = distance.abs().clamp(min=half).float() / half
    widest = torch.tensor((longest - 1) / half, dtype=torch.float32, device=distance.device).log()
    far = (sizes.log() / widest * (half - 1)).ceil().long() + half
    return torch.where(distance.abs() <= half, distance, far * distance.sign())
