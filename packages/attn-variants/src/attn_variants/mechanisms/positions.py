"""Attention with positions: rotary, ALiBi, relative biases and keys, sinusoids, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, Capability, DeclaredMechanism, Heads, MechanismConfig, Paper, Rotary
from attn_core.checks import require_flag, require_number, require_whole
from attn_core.modifiers import Alibi, RelativeBias, RelativeKeys, RelativeValues, T5Bias
from attn_core.rotary import rotary_scaling
from attn_core.scores import Dot

from attn_variants.mechanisms.common import GROUPED_SELF, self_attention, self_mask


class NoPositions(DeclaredMechanism):
    """Scaled dot-product attention to which nothing tells the order but, in two layers or more, the causal mask."""

    name = "nope"
    summary = "no positions; the causal mask alone tells the order"
    paper = Paper(
        title="The Impact of Positional Encoding on Length Generalization in Transformers",
        authors="Kazemnejad et al.",
        year=2023,
        arxiv="2305.19466",
    )
    equation = r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V"
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Plain attention; raises `InvalidValue` where key/value heads do not divide the heads."""
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))


class RotaryAttention(DeclaredMechanism):
    """Scaled dot-product attention on queries and keys that are turned by their positions.

    The model's rotary positions are used where it has some, else those of the options.
    """

    name = "rope"
    summary = "queries and keys are turned by their positions"
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
        """`base` b of the angles; `fraction` of each head is turned; `interleaved` pairs neighbours, as the paper.

        `scaling` stretches the positions: {"kind": "linear", "factor": 4} and so on, of kind linear,
        dynamic, yarn, llama3 or longrope with the fields of `attn_core`'s class of that kind.
        """

        base: float = 10000.0
        fraction: float = 1.0
        interleaved: bool = False
        scaling: Mapping[str, Any] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            require_number("base", self.base, gt=1)
            require_number("fraction", self.fraction, gt=0, le=1)
            _ = self.own

        @property
        def own(self) -> Rotary:
            """The rotary positions of the options."""
            scaling = None if self.scaling is None else rotary_scaling(self.scaling)
            return Rotary(base=self.base, fraction=self.fraction, interleaved=self.interleaved, scaling=scaling)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config), rotary=config.rotary or options.own)


class AttentionWithLinearBiases(DeclaredMechanism):
    """Scaled dot-product attention whose scores fall with the distance, at a rate of its own in every head.

    Where it is not causal, the bias is the same on both sides of the query.
    """

    name = "alibi"
    summary = "scores fall linearly with the distance"
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
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        return self_attention(config, modifiers=(Alibi(heads_of=config.heads_of),))


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
            require_whole("buckets", self.buckets, ge=1, unit="buckets")
            require_whole("max_distance", self.max_distance, ge=1, unit="positions")
            T5Bias(buckets=self.buckets, max_distance=self.max_distance, bidirectional=not self.causal)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        bias = T5Bias(buckets=options.buckets, max_distance=options.max_distance, bidirectional=not config.causal)
        return self_attention(config, score=Dot(), modifiers=(bias,))


class RelativeBiasAttention(DeclaredMechanism):
    """A learned bias per head and distance."""

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
        """`clip`: distances beyond it count as it."""

        clip: int = 16

        def __post_init__(self) -> None:
            super().__post_init__()
            require_whole("clip", self.clip, ge=1, unit="positions")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        clip = self.Config.of(config).clip
        return self_attention(config, modifiers=(RelativeBias(clip=clip),))


class ShawAttention(DeclaredMechanism):
    """A learned vector per distance is added to the keys, and another to the values."""

    name = "shaw"
    summary = "learned vectors per distance on keys and values"
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
        """`clip` k: distances beyond it count as it; `share` says that heads share the vectors."""

        clip: int = 16
        share: bool = False

        def __post_init__(self) -> None:
            super().__post_init__()
            require_whole("clip", self.clip, ge=0, unit="positions")
            require_flag("share", self.share)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        tables = (
            RelativeKeys(clip=options.clip, share=options.share),
            RelativeValues(clip=options.clip, share=options.share),
        )
        return self_attention(config, modifiers=tables)


COURSE = Paper(title="CS224N, Note 10: Self-Attention and Transformers", authors="Hewitt", year=2023)


class AddedPositions(DeclaredMechanism):
    """Sinusoids are added to queries, keys and values after their projections, in every head."""

    name = "positions_added"
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
        """Raises `InvalidValue` where key/value heads do not divide the heads."""
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))

    def paged_computation(self, config: MechanismConfig) -> None:
        """None: rows are remembered without positions, which must be given before they are met."""

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `AddedPositionsLayer` with random weights."""
        from attn_variants.mechanisms.sinusoidal_layers import AddedPositionsLayer

        return AddedPositionsLayer(
            self.spec(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            shares_kv=config.shares_kv,
            dropout=config.dropout,
        )


class ConcatenatedPositions(DeclaredMechanism):
    """Sinusoids of the size of a head stand behind queries, keys and values, so that contents and positions meet
    apart: the score is the sum of both products. What is remembered is as small as without positions."""

    name = "positions_concatenated"
    splits_heads = True
    summary = "sinusoids stand behind queries, keys and values"
    paper = COURSE
    equation = (
        r"o_i = \sum_j \alpha_{ij} [v_j; p_j],\quad"
        r" e_{ij} = \frac{q_i^\top k_j + p_i^\top p_j}{\sqrt{2 d_k}},\quad"
        r" p_{i,2m} = \sin(i\, 10000^{-2m/d_k}),\quad p_{i,2m+1} = \cos(i\, 10000^{-2m/d_k})"
    )
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def projected(self, config: MechanismConfig) -> Heads:
        """The heads without positions."""
        return config.head_layout

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where key/value heads do not divide the heads."""
        own = self.projected(config)
        heads = dataclasses.replace(own, key_size=2 * own.key_size, value_size=2 * own.value_size)
        return AttentionSpec(heads=heads, mask=self_mask(config))

    def paged_computation(self, config: MechanismConfig) -> None:
        """None: rows are remembered without positions, which must be given before they are met."""

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `ConcatenatedPositionsLayer` with random weights."""
        from attn_variants.mechanisms.sinusoidal_layers import ConcatenatedPositionsLayer

        return ConcatenatedPositionsLayer(
            self.spec(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            shares_kv=config.shares_kv,
            projected=self.projected(config),
            dropout=config.dropout,
        )
