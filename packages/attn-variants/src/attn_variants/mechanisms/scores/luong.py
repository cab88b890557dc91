"""Luong's global attention: every query meets the whole source, with the score of the `score` option."""

from __future__ import annotations

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig

from attn_variants.mechanisms.scores.luong_scores import CAPABILITIES, LUONG, LuongConfig, cross_heads, score_of


class GlobalLuongAttention(DeclaredMechanism):
    """Luong's global attention: every query meets the whole source, with the score of the `score` option.

    The paper scores the states themselves: projections that are the identity. Its h̃ = tanh(W [c; h]) joins what comes
    out with the decoder's state, and is the model's.
    """

    name = "luong"
    summary = "cross-attention to the whole source with dot, general, concat or location scores"
    paper = LUONG
    equation = (
        r"a_t(s) = \mathrm{softmax}_s(\mathrm{score}(h_t, \bar h_s)),\quad"
        r" c_t = \sum_s a_t(s) \bar h_s"
    )
    capabilities = CAPABILITIES

    Config = LuongConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where rotary positions are asked for."""
        return AttentionSpec(heads=cross_heads(config, self.name), score=score_of(config), cross=True)
