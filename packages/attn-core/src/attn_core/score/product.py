"""Scores that are products of a query and a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_core.heads import Heads
from attn_core.score.base import Score


@dataclass(frozen=True, kw_only=True)
class ScaledDot(Score):
    """q·k / √d_k (Vaswani et al. 2017). `scale` replaces 1/√d_k."""

    scale: float | None = None
    kind = "scaled_dot"
    equation = r"q^\top k / \sqrt{d_k}"


@dataclass(frozen=True, kw_only=True)
class Dot(Score):
    """q·k, not scaled (Luong et al. 2015, arXiv 1508.04025; T5, arXiv 1910.10683)."""

    kind = "dot"
    equation = r"q^\top k"


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
class Cosine(Score):
    """β q·k / (‖q‖‖k‖ + ε) with a learned β > 0 per head (content addressing, Graves et al. 2014, arXiv 1410.5401).

    β = softplus(`sharpness`), `sharpness` [heads]; `eps` keeps vectors of length zero at score zero.
    """

    eps: float = 1e-8
    kind = "cosine"
    equation = r"\beta\, q^\top k / (\lVert q \rVert \lVert k \rVert + \epsilon)"

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"sharpness": (heads.query,)}
