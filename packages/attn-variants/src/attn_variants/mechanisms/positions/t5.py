"""T5's relative bias."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper
from attn_core.modifiers import T5Bias
from attn_core.scores import Dot

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import check_whole


class T5Attention(DeclaredMechanism):
    """Unscaled products plus a learned bias per head and bucket of distances; the model needs no other positions."""

    name = "t5_bias"
    summary = "a learned bias per head and bucket of distances"
    paper = Paper(
        title="Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
        authors="Raffel et al.",
        year=2020,
        arxiv="1910.10683",
    )
    equation = r"O_h = \mathrm{softmax}\left(Q_h K_h^\top + b_{h,\,\mathrm{bucket}(j - i)} + M\right) V_h"
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """Half of the `buckets` of a direction hold one distance each, the others grow up to `max_distance`."""

        buckets: int = 32
        max_distance: int = 128

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("buckets", self.buckets, "buckets")
            check_whole("max_distance", self.max_distance, "positions")
            T5Bias(buckets=self.buckets, max_distance=self.max_distance, bidirectional=not self.causal)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        bias = T5Bias(buckets=options.buckets, max_distance=options.max_distance, bidirectional=not config.causal)
        heads = config.head_layout
        return AttentionSpec(heads=heads, score=Dot(), modifiers=(bias,), mask=self_mask(config), rotary=config.rotary)
