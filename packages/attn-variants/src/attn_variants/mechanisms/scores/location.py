"""Location-based attention."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.scores import Location

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_whole

UNKNOWN = 1024
"""Rows of W where nothing says how long sequences are."""


class LocationAttention(DeclaredMechanism):
    """The query alone says how much weight every position gets, whatever stands there.

    Sequences longer than `longest` are refused.
    """

    name = "location"
    summary = "the query alone scores the positions"
    paper = Paper(
        title="Effective Approaches to Attention-based Neural Machine Translation",
        authors="Luong et al.",
        year=2015,
        arxiv="1508.04025",
    )
    equation = (
        r"e_{ij} = (W q_i)_j,\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`longest` sequence there can be; by default the model's context, and where it has none 1024."""

        longest: int | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.longest is not None:
                check_whole("longest", self.longest, "tokens")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        longest = self.Config.of(config).longest
        longest = longest or config.context or UNKNOWN
        heads = config.head_layout
        return AttentionSpec(heads=heads, score=Location(longest=longest), mask=self_mask(config), rotary=config.rotary)
