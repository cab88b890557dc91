"""Attention with other scoring functions: additive, concat, cosine, dot, general, by location, Luong's local ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core import AttentionSpec, Capability, DeclaredMechanism, MechanismConfig, Paper, Window
from attn_core.checks import require_choice, require_whole
from attn_core.distributions import LocalGaussian
from attn_core.scores import Additive, Concat, Cosine, Dot, General, Location, Score

from attn_variants.mechanisms.common import CROSS, GROUPED_SELF, self_attention
from attn_variants.mechanisms.unprojected import STATES, StatesAttention, StatesConfig


@dataclass(frozen=True, kw_only=True)
class AdditiveConfig(MechanismConfig):
    """`intermediate_size` units of the scoring network of one head; `head_dim` by default."""

    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("intermediate_size", self.intermediate_size, ge=1, unit="units", optional=True)


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
        score = Additive(intermediate_size=AdditiveConfig.of(config).intermediate_size)
        return self_attention(config, score=score)


class GeneralAttention(DeclaredMechanism):
    """A learned matrix between query and key scores every pair; the scores are not scaled."""

    name = "general"
    summary = "a learned matrix between query and key"
    paper = Paper(
        title="Effective Approaches to Attention-based Neural Machine Translation",
        authors="Luong et al.",
        year=2015,
        arxiv="1508.04025",
    )
    equation = r"O = \mathrm{softmax}(Q W K^\top + M) V"
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        return self_attention(config, score=General())


class DotAttention(DeclaredMechanism):
    """Products of queries and keys score the pairs, and are not scaled."""

    name = "dot"
    summary = "products of queries and keys, not scaled"
    paper = Paper(
        title="Effective Approaches to Attention-based Neural Machine Translation",
        authors="Luong et al.",
        year=2015,
        arxiv="1508.04025",
    )
    equation = r"O = \mathrm{softmax}(Q K^\top + M) V"
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        return self_attention(config, score=Dot())


class CosineAttention(DeclaredMechanism):
    """The angle between query and key scores the pairs, with a learned sharpness in every head."""

    name = "cosine"
    summary = "the angle between query and key, with a learned sharpness"
    paper = Paper(
        title="Neural Turing Machines",
        authors="Graves et al.",
        year=2014,
        arxiv="1410.5401",
    )
    equation = (
        r"e_{ij} = \beta_h \frac{q_i^\top k_j}{\lVert q_i \rVert \lVert k_j \rVert + \epsilon},\quad"
        r" \beta_h = \mathrm{softplus}(b_h),\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        return self_attention(config, score=Cosine())


class ConcatAttention(DeclaredMechanism):
    """A small network scores every key and query laid end to end."""

    name = "concat"
    summary = "a small network over key and query laid end to end"
    paper = Paper(
        title="Effective Approaches to Attention-based Neural Machine Translation",
        authors="Luong et al.",
        year=2015,
        arxiv="1508.04025",
    )
    equation = (
        r"e_{ij} = v^\top \tanh(W [k_j; q_i] + b),\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF
    Config = AdditiveConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        score = Concat(intermediate_size=AdditiveConfig.of(config).intermediate_size)
        return self_attention(config, score=score)


LUONG = Paper(
    title="Effective Approaches to Attention-based Neural Machine Translation",
    authors="Luong et al.",
    year=2015,
    arxiv="1508.04025",
)
WORDS = ("dot", "general", "concat", "location")
UNKNOWN = 1024
"""Rows of W of location-based scores where neither the options nor the model name a longest sequence."""


@dataclass(frozen=True, kw_only=True)
class LuongConfig(StatesConfig):
    """`score` is dot, general, concat or location; with `projections` "all" queries, keys, values and output have a
    learned matrix each, with "none", as in the paper, none has."""

    score: str = "general"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("score", self.score, WORDS)


def score_of(config: MechanismConfig) -> Score:
    """The score that a config names."""
    word = LuongConfig.of(config).score
    if word == "location":
        return Location(longest=config.max_seq_len or UNKNOWN)
    scores: dict[str, Score] = {"dot": Dot(), "general": General(), "concat": Concat()}
    return scores[word]


class GlobalLuongAttention(StatesAttention):
    """Luong's global attention: every query meets the whole source, with the score of the `score` option.

    The paper scores the states themselves: `projections` "none". Its h̃ = tanh(W [c; h]) joins what comes
    out with the decoder's state, and is the model's.
    """

    name = "luong"
    splits_heads = True
    summary = "cross-attention to the whole source with dot, general, concat or location scores"
    paper = LUONG
    equation = (
        r"a_t(j) = \mathrm{softmax}_j(\mathrm{score}(q_t, k_j)),\quad"
        r" c_t = \textstyle\sum_j a_t(j) v_j;" + STATES
    )
    capabilities = CROSS

    Config = LuongConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        return AttentionSpec(heads=config.head_layout, score=score_of(config), cross=True)


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
            require_whole("longest", self.longest, ge=1, unit="tokens", optional=True)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        longest = self.Config.of(config).longest
        longest = longest or config.max_seq_len or UNKNOWN
        return self_attention(config, score=Location(longest=longest))


class MonotonicLocalAttention(StatesAttention):
    """Luong's local-m: query t meets the source within `radius` positions of t.

    A query further than that behind the end of the source meets nothing, and gets zeros.
    """

    name = "local_m"
    splits_heads = True
    summary = "cross-attention to the source around the query's own position"
    paper = LUONG
    equation = (
        r"a_t(j) = \mathrm{softmax}_{|j - t| \le D}(\mathrm{score}(q_t, k_j)),\quad"
        r" c_t = \textstyle\sum_j a_t(j) v_j;" + STATES
    )
    sketch: ClassVar = {"radius": 2}
    capabilities = CROSS

    @dataclass(frozen=True, kw_only=True)
    class Config(LuongConfig):
        """`radius` D of the window: it holds 2 D + 1 positions of the source."""

        radius: int = 10

        def __post_init__(self) -> None:
            super().__post_init__()
            require_whole("radius", self.radius, ge=1, unit="positions")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        radius = self.Config.of(config).radius
        return AttentionSpec(
            heads=config.head_layout,
            score=score_of(config),
            mask=Window(left=radius, right=radius),
            cross=True,
        )


class PredictiveLocalAttention(StatesAttention):
    """Luong's local-p: every query names a place of the source and meets what is within `radius` of it.

    Weights fall with the distance from the place as a Gaussian, and do not sum to one. The gradient reaches the place
    through the Gaussian only.
    """

    name = "local_p"
    splits_heads = True
    summary = "cross-attention to the source around a place that the query names"
    paper = LUONG
    equation = (
        r"p_t = S \, \sigma(v^\top \tanh(W q_t)),\quad"
        r" a_t(j) = \mathrm{softmax}_{|j - p_t| \le D}(\mathrm{score}(q_t, k_j))"
        r" \exp\left(-\frac{(j - p_t)^2}{2 (D/2)^2}\right);" + STATES
    )
    sketch: ClassVar = {"radius": 2}
    capabilities = CROSS - {Capability.NORMALISED} | {Capability.CHOOSES}

    @dataclass(frozen=True, kw_only=True)
    class Config(LuongConfig):
        """`radius` D of the window: it holds 2 D + 1 positions of the source."""

        radius: int = 10

        def __post_init__(self) -> None:
            super().__post_init__()
            require_whole("radius", self.radius, ge=1, unit="positions")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        radius = self.Config.of(config).radius
        return AttentionSpec(
            heads=config.head_layout,
            score=score_of(config),
            distribution=LocalGaussian(radius=radius),
            cross=True,
        )
