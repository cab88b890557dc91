"""Low-rank keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import Cost, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.whole_sequence import ENCODER, WholeSequence


class LowRankAttention(WholeSequence):
    """Keys and values of a sequence are replaced by the closest matrices of a rank, found anew for each sequence.

    Tokens then weigh `rank` elements for keys and as many for values. The rank's space depends on all tokens: there is
    no causal form. At the full rank it is softmax attention.
    """

    name = "low_rank"
    summary = "softmax attention over keys and values of a low rank"
    paper = Paper(
        title="The approximation of one matrix by another of lower rank", authors="Eckart and Young", year=1936
    )
    equation = (
        r"o = \mathrm{softmax}\left(\frac{Q K_r^\top}{\sqrt{d}}\right) V_r,\quad"
        r" K_r = \sum_{i \le r} \sigma_i u_i w_i^\top \approx K"
    )
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`rank` of keys and of values, at most the head size; half of it by default."""

        rank: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.rank is None:
                return
            check_whole("rank", self.rank, "elements")
            if self.rank > self.head_layout.key_size:
                raise InvalidValue.of("rank", self.rank, f"at most the head size, {self.head_layout.key_size}")

    def attention(self, config: MechanismConfig) -> Any:
        """Singular values of keys and values."""
        from attn_variants.mechanisms.low_rank.layers import LowRank

        return LowRank(rank_of(config))

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Squares of keys and values, their parts in the rank's space, and the pairs of these."""
        (heads, size), rank = self.inner_size(config), rank_of(config)
        per_token = 2 * size**2 + 4 * size * rank + 2 * shape.query * rank
        flops = self.projected(config, shape) + 2 * shape.batch * heads * shape.query * per_token
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))


def rank_of(config: MechanismConfig) -> int:
    """The rank of keys and values."""
    own = LowRankAttention.Config.of(config).rank
    return own or max(1, config.head_layout.key_size // 2)
