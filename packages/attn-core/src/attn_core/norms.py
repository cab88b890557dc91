"""Normalisation of queries and keys before the score, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_core.heads import Heads, Part


@dataclass(frozen=True, kw_only=True)
class QkNorm(Part):
    """q / rms(q) · g_q and k / rms(k) · g_k in every head, before rotary positions (Henry et al. 2020).

    arXiv 2010.04245, in the form of Qwen 3 and Gemma 3.

    `query_gain` and `key_gain` [key_size] are shared by all heads; `eps` is added to the mean square.
    """

    eps: float = 1e-6
    kind = "qk_norm"

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"query_gain": (heads.key_size,), "key_gain": (heads.key_size,)}

    def key_parameters(self, heads: Heads) -> int:
        """Number of those weights that apply only to keys."""
        return heads.key_size


@dataclass(frozen=True, kw_only=True)
class QkvNorm(QkNorm):
    """As `QkNorm`, and values are divided by their root mean square too, without a gain (Gemma 4)."""

    kind = "qkv_norm"


@dataclass(frozen=True, kw_only=True)
class QkNormAllHeads(QkNorm):
    """As `QkNorm`, but the mean square is that of all heads together (OLMo 2, arXiv 2501.00656, section 3.1).

    `query_gain` [heads · key_size] and `key_gain` [key/value heads · key_size].
    """

    kind = "qk_norm_all_heads"

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"query_gain": (heads.query * heads.key_size,), "key_gain": (heads.key_value * heads.key_size,)}

    def key_parameters(self, heads: Heads) -> int:
        return heads.key_value * heads.key_size


@dataclass(frozen=True, kw_only=True)
class QkL2Norm(QkNorm):
    """g q / ‖q‖ and k / ‖k‖ in every head, for a score that is their plain product (Henry et al. 2020).

    `query_gain` [1] is the paper's learned g, the same in all heads, initialised to log₂(length² - length) for training
    sequences of `length` tokens; `eps` is added to the squared norm.
    """

    eps: float = 1e-12
    length: int = 1024
    kind = "qk_l2_norm"

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"query_gain": (1,)}

    def key_parameters(self, heads: Heads) -> int:
        return 0
