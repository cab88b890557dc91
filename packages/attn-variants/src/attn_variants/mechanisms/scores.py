"""Attention with other score functions: additive, concat, cosine, dot, general, location, and Luong's attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import AttentionSpec, Capability, DeclaredMechanism, MechanismConfig, Paper, Window
from attn_core.checks import checked, require_choice, require_number, require_whole
from attn_core.distributions import LocalGaussian
from attn_core.scores import ACTIVATIONS, Additive, Concat, Cosine, Dot, General, Location, Score

from attn_variants.mechanisms.common import CROSS, GROUPED_SELF, ValueSizeConfig, self_attention
from attn_variants.mechanisms.unprojected import STATES, StatesAttention, StatesConfig


@dataclass(frozen=True, kw_only=True)
class AdditiveConfig(MechanismConfig):
    """`intermediate_size` is the number of hidden units of each head's scoring network, `head_dim` by default, and
    `activation` theirs, "tanh" or "relu"."""

    intermediate_size: int | None = checked(None, require_whole, ge=1, unit="units", optional=True)
    activation: str = checked("tanh", require_choice, ACTIVATIONS)

    @property
    def network(self) -> dict[str, Any]:
        """The fields of the score."""
        return {"intermediate_size": self.intermediate_size, "activation": self.activation}


@dataclass(frozen=True, kw_only=True)
class AdditiveSelfConfig(AdditiveConfig, ValueSizeConfig):
    """`intermediate_size` is the number of hidden units of each head's scoring network, `head_dim` by default, and
    `activation` theirs, "tanh" or "relu". `value_size` is the size of the values of a head, `head_dim` by default."""


class AdditiveAttention(DeclaredMechanism):
    """Scores every query-key pair by a small network with one hidden layer."""

    name = "additive"
    summary = "a network with one hidden layer scores each pair of query and key"
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
    Config = AdditiveSelfConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        score = Additive(**AdditiveConfig.of(config).network)
        return self_attention(config, score=score)


LUONG = Paper(
    title="Effective Approaches to Attention-based Neural Machine Translation",
    authors="Luong et al.",
    year=2015,
    arxiv="1508.04025",
)


class GeneralAttention(DeclaredMechanism):
    """Scores every pair by a learned bilinear form of query and key, without scaling."""

    name = "general"
    summary = "bilinear scores: a learned matrix between query and key"
    paper = LUONG
    equation = r"O = \mathrm{softmax}(Q W K^\top + M) V"
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, score=General())


class DotAttention(DeclaredMechanism):
    """Scores every pair by the dot product of query and key, without scaling."""

    name = "dot"
    summary = "unscaled dot products of queries and keys"
    paper = LUONG
    equation = r"O = \mathrm{softmax}(Q K^\top + M) V"
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, score=Dot())


class CosineAttention(DeclaredMechanism):
    """Scores every pair by the cosine similarity of query and key, times a learned sharpness per head."""

    name = "cosine"
    summary = "the cosine of query and key, times a learned sharpness per head"
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

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`beta` is a sharpness that is not learned; 1 leaves the cosine alone, None learns one for each head."""

        beta: float | None = checked(None, require_number, gt=0, optional=True)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, score=Cosine(beta=self.Config.of(config).beta))


class ConcatAttention(DeclaredMechanism):
    """Scores every pair by a small network over the concatenation of key and query."""

    name = "concat"
    summary = "a network with one hidden layer scores the concatenation of key and query"
    paper = LUONG
    equation = (
        r"e_{ij} = v^\top \tanh(W [k_j; q_i] + b),\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF
    Config = AdditiveConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        score = Concat(**AdditiveConfig.of(config).network)
        return self_attention(config, score=score)


WORDS = ("dot", "general", "concat", "location")
UNKNOWN = 1024
"""The number of rows of W of location-based scores if neither the options nor the model give the longest sequence."""


@dataclass(frozen=True, kw_only=True)
class LuongConfig(StatesConfig):
    """`score` is dot, general, concat or location. With `projections` "all", queries, keys, values and output each have
    a learned matrix; with "none", as in the paper, none has."""

    score: str = checked("general", require_choice, WORDS)


@dataclass(frozen=True, kw_only=True)
class LuongLocalConfig(LuongConfig):
    """`radius` D is that of the window, which contains 2 D + 1 positions of the source."""

    radius: int = checked(10, require_whole, ge=1, unit="positions")


def score_of(config: MechanismConfig) -> Score:
    """The score function named by a config."""
    word = LuongConfig.of(config).score
    if word == "location":
        return Location(longest=config.max_seq_len or UNKNOWN)
    scores: dict[str, Score] = {"dot": Dot(), "general": General(), "concat": Concat()}
    return scores[word]


class GlobalLuongAttention(StatesAttention):
    """Luong's global attention: every query attends to the whole source, with the score function `score`.

    As in the paper, `projections` "none" scores the states themselves. The paper's h̃ = tanh(W [c; h]), which combines
    the output with the decoder's state, is left to the model.
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
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return AttentionSpec(heads=config.head_layout, score=score_of(config), cross=True)


class LocationAttention(DeclaredMechanism):
    """Scores positions from the query alone, whatever the keys are.

    Sequences longer than `longest` raise `InvalidValue`.
    """

    name = "location"
    summary = "scores are computed from the query alone, one for each key position"
    paper = LUONG
    equation = (
        r"e_{ij} = (W q_i)_j,\quad"
        r" O = \mathrm{softmax}(e + M) V"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`longest` is the length of the longest sequence, by default the model's context length, or 1024."""

        longest: int | None = checked(None, require_whole, ge=1, unit="tokens", optional=True)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        longest = self.Config.of(config).longest
        longest = longest or config.max_seq_len or UNKNOWN
        return self_attention(config, score=Location(longest=longest))


class MonotonicLocalAttention(StatesAttention):
    """Luong's local-m: query t attends to the source within `radius` positions of t.

    A query further than that past the end of the source sees no key, and gets zeros.
    """

    name = "local_m"
    splits_heads = True
    summary = "cross-attention to a window of the source around the query's own position"
    paper = LUONG
    equation = (
        r"a_t(j) = \mathrm{softmax}_{|j - t| \le D}(\mathrm{score}(q_t, k_j)),\quad"
        r" c_t = \textstyle\sum_j a_t(j) v_j;" + STATES
    )
    sketch: ClassVar = {"radius": 2}
    capabilities = CROSS

    Config = LuongLocalConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        radius = self.Config.of(config).radius
        return AttentionSpec(
            heads=config.head_layout,
            score=score_of(config),
            mask=Window(left=radius, right=radius),
            cross=True,
        )


class PredictiveLocalAttention(StatesAttention):
    """Luong's local-p: every query predicts a position of the source and attends to the keys within `radius` of it.

    Weights are multiplied by a Gaussian of the distance from that position, and do not sum to one. Only the Gaussian
    passes a gradient to the position.
    """

    name = "local_p"
    splits_heads = True
    summary = "cross-attention to a window of the source around a position predicted from the query"
    paper = LUONG
    equation = (
        r"p_t = S \, \sigma(v^\top \tanh(W q_t)),\quad"
        r" a_t(j) = \mathrm{softmax}_{|j - p_t| \le D}(\mathrm{score}(q_t, k_j))"
        r" \exp\left(-\frac{(j - p_t)^2}{2 (D/2)^2}\right);" + STATES
    )
    sketch: ClassVar = {"radius": 2}
    capabilities = CROSS - {Capability.NORMALISED} | {Capability.CHOOSES}

    Config = LuongLocalConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        radius = self.Config.of(config).radius
        return AttentionSpec(
            heads=config.head_layout,
            score=score_of(config),
            distribution=LocalGaussian(radius=radius),
            cross=True,
        )
