"""The intermediate results of a layer that computes a spec: scores, allowed pairs, weights and weighted sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attn_variants.compute.distribution import distribute
from attn_variants.compute.modifiers import modify
from attn_variants.compute.plain import pairs_of, summed
from attn_variants.scores import scores


@dataclass(frozen=True, eq=False, kw_only=True)
class Intermediates:
    """The intermediate results for one sequence.

    `query` [heads, query, key_size], `key` [num_kv_heads, key, size] as the score reads it (None if it reads none),
    `value` [num_kv_heads, key, value_size], `scores` and `weights` [heads, query, key], `allowed`, bool, of the same
    shape (None if all pairs are), `sums` [heads, query, value_size], `out` [query, hidden_size].
    """

    query: Tensor
    key: Tensor | None
    value: Tensor
    scores: Tensor
    allowed: Tensor | None
    weights: Tensor
    sums: Tensor
    out: Tensor


def intermediates_of(layer: Any, rows: Tensor, source: Tensor | None) -> Intermediates:
    """The intermediate results of a `SpecLayer` for `rows` and, in cross-attention, `source` [tokens, hidden_size]."""
    spec, query = layer.spec, rows[None]
    if source is None:
        fields = layer.project_kv(query)
        projected = layer.project_rotated(query, layer.cos_sin_to(len(rows), query))
    else:
        fields = {name: field[None] for name, field in layer.encode(source)["source"].items()}
        projected = layer.project_query(query)
    pairs = pairs_of(spec, layer.operands(projected, fields, None, layer.positions(query, None)))
    energies = modify(pairs, scores(pairs))
    weights = distribute(pairs, energies)
    sums = summed(spec, pairs.operands, weights)
    return Intermediates(
        query=pairs.query[0],
        key=pairs.key[0] if pairs.operands.key.shape[-1] else None,
        value=pairs.operands.value[0].transpose(0, 1),
        scores=energies[0],
        allowed=None if pairs.allowed is None else pairs.allowed.expand(1, -1, *energies.shape[-2:])[0],
        weights=weights[0],
        sums=sums[0].transpose(0, 1),
        out=layer.output(sums.flatten(-2))[0],
    )
