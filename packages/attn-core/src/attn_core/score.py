"""Scoring functions e = f(q, k), as data; a computation gives them their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core.heads import Heads


@dataclass(frozen=True, kw_only=True)
class Score:
    """A scoring function. `kind` is the word kernels accept or refuse.

    The `*_flops` methods count matrix products of all heads, two per multiply-add.
    """

    kind: ClassVar[str]
    equation: ClassVar[str]

    def query_flops(self, heads: Heads) -> int:
        """Work per query token, before any key is met."""
        return 0

    def key_flops(self, heads: Heads) -> int:
        """Work per key token, before any query is met."""
        return 0

    def pair_flops(self, heads: Heads) -> int:
        """Work per pair of a query and a key."""
        return 2 * heads.query * heads.key_size

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the learned weights by name, as kernels find them in `Operands.parameters`."""
        return {}

    def parameters(self, heads: Heads) -> int:
        """Number of learned weights."""
        return sum(math.prod(shape) for shape in self.weights(heads).values())


@dataclass(frozen=True, kw_only=True)
class ScaledDot(Score):
    """q·k / √d_k (Vaswani et al. 2017). `scale` replaces 1/√d_k; Luong's plain dot is `scale=1.0`."""

    scale: float | None = None
    kind = "scaled_dot"
    equation = r"q^\top k / \sqrt{d_k}"


@dataclass(frozen=True, kw_only=True)
class General(Score):
    """qᵀ W k with one learned W [key_size, key_size] per query head (Luong et al. 2015, arXiv 1508.04025).

    `weight` is [heads, key_size, key_size].
    """

    kind = "general"
    equation = r"q^\top W k"

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size**2

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (heads.query, heads.key_size, heads.key_size)}


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
class Modifier:
    """A change to the scores before the distribution."""

    kind: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Alibi(Modifier):
    """Adds -m_h |i - j|, slopes m_h = 2^(-8h/H) (Press et al. 2022, arXiv 2108.12409)."""

    kind = "alibi"


@dataclass(frozen=True, kw_only=True)
class SoftCap(Modifier):
    """c tanh(e / c) before the mask (Gemma 2, arXiv 2408.00118)."""

    cap: float
    kind = "soft_cap"


@dataclass(frozen=True)
class ScoreFunction(Modifier):
    """A change given as a function, FlexAttention's `score_mod` without the batch.

    `function(score, head, query, key)` gets scores [batch, heads, query, key] and integer tensors that
    broadcast with them (head index, absolute query and key positions), and returns the new scores.
    """

    function: Callable[[Any, Any, Any, Any], Any]
    kind = "function"


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions on queries and keys (Su et al. 2021, arXiv 2104.09864).

    `fraction` of each head is rotated; `interleaved` pairs (0, 1), (2, 3), ... as in the paper, otherwise the
    first half with the second, as in Llama checkpoints.
    """

    base: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
