"""Stick-breaking attention."""

from __future__ import annotations

from attn_core import AttentionSpec, Capability, Causal, DeclaredMechanism, MechanismConfig, Paper, Window
from attn_core.distributions import StickBreaking

from attn_variants.mechanisms.capabilities import UNNORMALISED
from attn_variants.mechanisms.sparse.common import only_causal


class StickBreakingAttention(DeclaredMechanism):
    """Every key takes its part of what the later ones left, from the query's neighbour backwards; needs no positions.

    A query does not see itself, so that the first gets nothing.
    """

    name = "stick_breaking"
    summary = "the nearest key takes its part first, and earlier ones of what is left"
    paper = Paper(
        title="Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study",
        authors="Tan et al.",
        year=2024,
        arxiv="2410.17980",
    )
    equation = (
        r"\alpha_{ij} = \sigma(e_{ij}) \prod_{j < k < i} (1 - \sigma(e_{ik})),\quad"
        r" e = Q K^\top / \sqrt{d_k},\quad o_i = \sum_{j < i} \alpha_{ij} v_j"
    )
    capabilities = UNNORMALISED - {Capability.BIDIRECTIONAL}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where it is to look ahead, `InvalidValue` where key/value heads do not divide heads."""
        only_causal(self.name, config)
        earlier = Causal() & ~Window(left=0)
        return AttentionSpec(heads=config.head_layout, distribution=StickBreaking(), mask=earlier, rotary=config.rotary)
