"""Attention with position encodings: rotary, ALiBi, relative biases and keys, sinusoids, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, Capability, DeclaredMechanism, Heads, MechanismConfig, Paper, Rotary
from attn_core.checks import checked, require_number, require_whole
from attn_core.modifiers import Alibi, RelativeBias, RelativeKeys, RelativeValues, T5Bias
from attn_core.rotary import rotary_scaling
from attn_core.scores import Dot, ScaledDot

from attn_variants.mechanisms.common import GROUPED_SELF, self_attention, self_mask


class NoPositions(DeclaredMechanism):
    """Scaled dot-product attention without a position encoding; the causal mask conveys order from two layers on."""

    name = "nope"
    summary = "no positional encoding; only the causal mask conveys the order"
    paper = Paper(
        title="The Impact of Positional Encoding on Length Generalization in Transformers",
        authors="Kazemnejad et al.",
        year=2023,
        arxiv="2305.19466",
    )
    equation = r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V"
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The spec of plain attention; raises `InvalidValue` unless the key/value heads divide the heads."""
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))


class RotaryAttention(DeclaredMechanism):
    """Scaled dot-product attention with a rotary embedding of queries and keys.

    The model's rotary embedding is used if it has one, else that of the options.
    """

    name = "rope"
    summary = "queries and keys are rotated by angles proportional to their positions"
    paper = Paper(
        title="RoFormer: Enhanced Transformer with Rotary Position Embedding",
        authors="Su et al.",
        year=2021,
        arxiv="2104.09864",
    )
    equation = (
        r"e_{ij} = \frac{(R_i q_i)^\top (R_j k_j)}{\sqrt{d_k}},\quad"
        r" R_m = \mathrm{diag}\left(e^{\mathrm{i} m \theta_0}, e^{\mathrm{i} m \theta_1}, \dots\right),\quad"
        r" \theta_p = b^{-2p/d_k}"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`base` b is that of the angles; `fraction`, the part of each head that is rotated; `interleaved` pairs
        neighbouring elements, as in the paper, instead of halves.

        `scaling` extends the context, such as {"kind": "linear", "factor": 4}; kinds are linear, dynamic, yarn, llama3
        and longrope, with the fields of the class of that kind in `attn_core`.
        """

        base: float = checked(10000.0, require_number, gt=1)
        fraction: float = checked(1.0, require_number, gt=0, le=1)
        interleaved: bool = False
        scaling: Mapping[str, Any] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            _ = self.own

        @property
        def own(self) -> Rotary:
            """The rotary embedding of the options."""
            scaling = None if self.scaling is None else rotary_scaling(self.scaling)
            return Rotary(base=self.base, fraction=self.fraction, interleaved=self.interleaved, scaling=scaling)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config), rotary=config.rotary or options.own)


class AttentionWithLinearBiases(DeclaredMechanism):
    """ALiBi: scaled dot-product attention whose scores decrease linearly with the distance, at a rate per head.

    If not causal, the bias is symmetric around the query.
    """

    name = "alibi"
    summary = "scores decrease linearly with the distance, at a fixed slope per head"
    used_by = ("BLOOM", "MPT")
    paper = Paper(
        title="Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
        authors="Press et al.",
        year=2022,
        arxiv="2108.12409",
    )
    equation = (
        r"O_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} - m_h |i - j| + M\right) V_h,\quad"
        r" m_h = 2^{-8h/H}"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, modifiers=(Alibi(heads_of=config.heads_of),))


class T5Attention(DeclaredMechanism):
    """Dot products, unscaled as T5's unless `scaled`, plus a learned bias per head and bucket of distances; needs no
    other position encoding."""

    name = "t5_bias"
    summary = "a learned bias per head and bucket of distances"
    used_by = ("T5", "MPNet")
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
        """Half of the `buckets` of each direction hold one distance each, the others growing ranges of distances up to
        `max_distance`; with `scaled`, products are divided by √head_dim (MPNet)."""

        buckets: int = checked(32, require_whole, ge=1, unit="buckets")
        max_distance: int = checked(128, require_whole, ge=1, unit="positions")
        scaled: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            T5Bias(buckets=self.buckets, max_distance=self.max_distance, bidirectional=not self.causal)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        bias = T5Bias(buckets=options.buckets, max_distance=options.max_distance, bidirectional=not config.causal)
        return self_attention(config, score=ScaledDot() if options.scaled else Dot(), modifiers=(bias,))


class RelativeBiasAttention(DeclaredMechanism):
    """Adds a learned bias per head and distance to the scores."""

    name = "relative_bias"
    summary = "a learned bias per head and distance"
    paper = Paper(
        title="Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
        authors="Liu et al.",
        year=2021,
        arxiv="2103.14030",
    )
    equation = (
        r"O_h = \mathrm{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_k}} + b_{h,\,\mathrm{clip}(j - i)} + M\right) V_h"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clip` is the largest distance, to which larger ones are clipped."""

        clip: int = checked(16, require_whole, ge=1, unit="positions")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        clip = self.Config.of(config).clip
        return self_attention(config, modifiers=(RelativeBias(clip=clip),))


class ShawAttention(DeclaredMechanism):
    """Adds a learned vector per distance to the keys, and another to the values."""

    name = "shaw"
    summary = "learned vectors for each distance are added to keys and values"
    paper = Paper(
        title="Self-Attention with Relative Position Representations",
        authors="Shaw et al.",
        year=2018,
        arxiv="1803.02155",
    )
    equation = (
        r"e_{ij} = \frac{q_i^\top (k_j + a^K_{c(j - i)})}{\sqrt{d_k}},\quad"
        r" o_i = \sum_j \alpha_{ij} (v_j + a^V_{c(j - i)}),\quad"
        r" c(x) = \max(-k, \min(k, x))"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`clip` k is the largest distance, to which larger ones are clipped; with `share`, heads share the vectors."""

        clip: int = checked(16, require_whole, ge=0, unit="positions")
        share: bool = False

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        options = self.Config.of(config)
        tables = (
            RelativeKeys(clip=options.clip, share=options.share),
            RelativeValues(clip=options.clip, share=options.share),
        )
        return self_attention(config, modifiers=tables)


COURSE = Paper(title="CS224N, Note 10: Self-Attention and Transformers", authors="Hewitt", year=2023)


class AddedPositions(DeclaredMechanism):
    """Adds sinusoids to queries, keys and values after their projections, in every head."""

    name = "positions_added"
    counts_from_start = True  # positions are added to the inputs
    splits_heads = True
    summary = "sinusoids are added to queries, keys and values"
    paper = COURSE
    equation = (
        r"o_i = \sum_j \alpha_{ij} (v_j + p_j),\quad"
        r" e_{ij} = \frac{(q_i + p_i)^\top (k_j + p_j)}{\sqrt{d_k}},\quad"
        r" p_{i,2m} = \sin(i\, 10000^{-2m/d_k}),\quad p_{i,2m+1} = \cos(i\, 10000^{-2m/d_k})"
    )
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))

    def paged_computation(self, config: MechanismConfig) -> None:
        """None, as keys and values are cached without positions, which are added before attention."""

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A new `AddedPositionsLayer` with randomly initialised weights."""
        from attn_variants.mechanisms.sinusoidal_layers import AddedPositionsLayer

        return AddedPositionsLayer(
            self.spec(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            shares_kv=config.shares_kv,
            dropout=config.dropout,
        )


class ConcatenatedPositions(DeclaredMechanism):
    """Appends sinusoids of the size of a head to queries, keys and values, so that the score is the sum of a content
    product and a position product. The cache is as small as without positions."""

    name = "positions_concatenated"
    counts_from_start = True  # positions are concatenated to the inputs
    splits_heads = True
    summary = "sinusoids are concatenated to queries, keys and values"
    paper = COURSE
    equation = (
        r"o_i = \sum_j \alpha_{ij} [v_j; p_j],\quad"
        r" e_{ij} = \frac{q_i^\top k_j + p_i^\top p_j}{\sqrt{2 d_k}},\quad"
        r" p_{i,2m} = \sin(i\, 10000^{-2m/d_k}),\quad p_{i,2m+1} = \cos(i\, 10000^{-2m/d_k})"
    )
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def projected(self, config: MechanismConfig) -> Heads:
        """The heads of the projections, without the sinusoids."""
        return config.head_layout

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        own = self.projected(config)
        heads = dataclasses.replace(own, key_size=2 * own.key_size, value_size=2 * own.value_size)
        return AttentionSpec(heads=heads, mask=self_mask(config))

    def paged_computation(self, config: MechanismConfig) -> None:
        """None, as keys and values are cached without positions, which are added before attention."""

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A new `ConcatenatedPositionsLayer` with randomly initialised weights."""
        from attn_variants.mechanisms.sinusoidal_layers import ConcatenatedPositionsLayer

        return ConcatenatedPositionsLayer(
            self.spec(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            shares_kv=config.shares_kv,
            projected=self.projected(config),
            dropout=config.dropout,
        )
