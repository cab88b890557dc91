"""Scores by a small network with one hidden layer over every pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_core.heads import Heads
from attn_core.score.base import Score


@dataclass(frozen=True, kw_only=True)
class Additive(Score):
    """vᵀ tanh(W_q q + W_k k + b) (Bahdanau et al. 2015, arXiv 1409.0473).

    `hidden` units, by default the key size; W_q, b and v once per query head, W_k once per key/value head:
    `query_weight` [heads, key_size, units], `key_weight` [key_value_heads, key_size, units], `bias` and `vector`
    [heads, units].
    """

    hidden: int | None = None
    kind = "additive"
    equation = r"v^\top \tanh(W_q q + W_k k + b)"

    def units(self, heads: Heads) -> int:
        """Hidden units of one head."""
        return self.hidden or heads.key_size

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size * self.units(heads)

    def key_flops(self, heads: Heads) -> int:
        return 2 * heads.key_value * heads.key_size * self.units(heads)

    def pair_flops(self, heads: Heads) -> int:
        return 2 * heads.query * self.units(heads)

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        units = self.units(heads)
        return {
            "query_weight": (heads.query, heads.key_size, units),
            "key_weight": (heads.key_value, heads.key_size, units),
            "bias": (heads.query, units),
            "vector": (heads.query, units),
        }


@dataclass(frozen=True, kw_only=True)
class Concat(Score):
    """vᵀ tanh(W [k; q] + b) (Luong et al. 2015, arXiv 1508.04025), the additive score with W = [W_k | W_q].

    `hidden` units, by default the key size; per query head, so that heads of a group share no part of W: `weight`
    [heads, 2 key_size, units], its first rows for the key, `bias` and `vector` [heads, units].
    """

    hidden: int | None = None
    kind = "concat"
    equation = r"v^\top \tanh(W [k; q] + b)"

    def units(self, heads: Heads) -> int:
        """Hidden units of one head."""
        return self.hidden or heads.key_size

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size * self.units(heads)

    def key_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size * self.units(heads)

    def pair_flops(self, heads: Heads) -> int:
        return 2 * heads.query * self.units(heads)

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        units = self.units(heads)
        return {
            "weight": (heads.query, 2 * heads.key_size, units),
            "bias": (heads.query, units),
            "vector": (heads.query, units),
        }
