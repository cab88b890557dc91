"""Additive attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.scores import Additive

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_whole


@dataclass(frozen=True, kw_only=True)
class AdditiveConfig(MechanismConfig):
    """`hidden` units of the scoring network of one head; the head size by default."""

    hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden is not None:
            check_whole("hidden", self.hidden, "units")


class AdditiveAttention(DeclaredMechanism):
    """A small network with one hidden layer scores every pair of a query and a key."""

    name = "additive"
    summary = "a small network scores every pair"
    paper = Paper(
        title="Neural Machine Translation by Jointly Learning to Align and Translate",
        authors="Bahdanau et al.",
        year=2015,
        arxiv="1409.0473",
    )
    equation = (
        r"e_{ij} = v^\top \tanh(W_q q_i + W_k k_j + b),\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF
    Config = AdditiveConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        score = Additive(hidden=AdditiveConfig.of(config).hidden)
        heads = config.head_layout
        return AttentionSpec(heads=heads, score=score, mask=self_mask(config), rotary=config.rotary)
