"""Luong's local-m: query t meets the source within `radius` positions of t."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Window

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.scores.luong_scores import CAPABILITIES, LUONG, LuongConfig, cross_heads, score_of


class MonotonicLocalAttention(DeclaredMechanism):
    """Luong's local-m: query t meets the source within `radius` positions of t.

    A query further than that behind the end of the source meets nothing, and gets zeros.
    """

    name = "local_m"
    summary = "cross-attention to the source around the query's own position"
    paper = LUONG
    equation = (
        r"a_t(s) = \mathrm{softmax}_{|s - t| \le D}(\mathrm{score}(h_t, \bar h_s)),\quad"
        r" c_t = \sum_s a_t(s) \bar h_s"
    )
    sketch: ClassVar = {"radius": 2}
    capabilities = CAPABILITIES

    @dataclass(frozen=True, kw_only=True)
    class Config(LuongConfig):
        """`radius` D of the window: it holds 2 D + 1 positions of the source."""

        radius: int = 10

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("radius", self.radius, "positions")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where rotary positions are asked for."""
        radius = self.Config.of(config).radius
        return AttentionSpec(
            heads=cross_heads(config, self.name),
            score=score_of(config),
            mask=Window(left=radius, right=radius),
            cross=True,
        )
