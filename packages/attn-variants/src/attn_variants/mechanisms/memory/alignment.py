"""Additive attention to a source."""

from __future__ import annotations

from attn_core import AttentionSpec, Capability, DeclaredMechanism, MechanismConfig, Paper
from attn_core.distributions import Distribution, Softmax
from attn_core.errors import Incompatible
from attn_core.scores import Additive

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.hidden import HiddenConfig

CROSS = GROUPED_SELF - {Capability.CAUSAL, Capability.ROTARY, Capability.BORROWS} | {Capability.CROSS}


class Alignment(DeclaredMechanism):
    """Additive attention of queries, such as a decoder's states, to the annotations of a source."""

    name = "alignment"
    summary = "a small network aligns queries with a source"
    paper = Paper(
        title="Neural Machine Translation by Jointly Learning to Align and Translate",
        authors="Bahdanau et al.",
        year=2015,
        arxiv="1409.0473",
    )
    equation = r"e_{ij} = v^\top \tanh(W_a q_i + U_a h_j + b),\quad c_i = \sum_j \mathrm{softmax}(e_i)_j h_j"
    capabilities = CROSS
    Config = HiddenConfig
    distribution: Distribution = Softmax()

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `Incompatible` where rotary positions are asked for: queries and source share no positions."""
        if config.rotary is not None:
            raise Incompatible(f"mechanism {self.name!r} takes no rotary positions: queries and source share none")
        score = Additive(hidden=HiddenConfig.of(config).hidden)
        return AttentionSpec(heads=config.head_layout, score=score, distribution=self.distribution, cross=True)
