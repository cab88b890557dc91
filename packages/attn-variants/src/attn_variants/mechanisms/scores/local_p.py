"""Luong's local-p: every query names a place of the source and meets what is within `radius` of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, Capability, DeclaredMechanism, MechanismConfig
from attn_core.distributions import LocalGaussian

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.scores.luong_scores import CAPABILITIES, LUONG, LuongConfig, cross_heads, score_of


class PredictiveLocalAttention(DeclaredMechanism):
    """Luong's local-p: every query names a place of the source and meets what is within `radius` of it.

    Weights fall with the distance from the place as a Gaussian, and do not sum to one. The gradient reaches the place
    through the Gaussian only.
    """

    name = "local_p"
    summary = "cross-attention to the source around a place that the query names"
    paper = LUONG
    equation = (
        r"p_t = S \, \sigma(v^\top \tanh(W h_t)),\quad"
        r" a_t(s) = \mathrm{softmax}_{|s - p_t| \le D}(\mathrm{score}(h_t, \bar h_s))"
        r" \exp\left(-\frac{(s - p_t)^2}{2 (D/2)^2}\right)"
    )
    sketch: ClassVar = {"radius": 2}
    capabilities = CAPABILITIES - {Capability.NORMALISED} | {Capability.CHOOSES}

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
            distribution=LocalGaussian(radius=radius),
            cross=True,
        )
