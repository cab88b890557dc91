"""Attention of recurrent decoders: Bahdanau's alignment and Show, Attend and Tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attn_core import AttentionSpec, Capability, Cost, MechanismConfig, Paper, Shape, Step
from attn_core.checks import checked, require_number
from attn_core.distributions import Distribution, Hard, Softmax
from attn_core.scores import Additive

from attn_variants.mechanisms.common import CROSS
from attn_variants.mechanisms.scores import AdditiveConfig
from attn_variants.mechanisms.unprojected import STATES, StatesAttention, StatesConfig

if TYPE_CHECKING:
    from attn_variants.mechanisms.alignment_layer import GatedAttention, GatedSamplingAttention


@dataclass(frozen=True, kw_only=True)
class AlignmentConfig(AdditiveConfig, StatesConfig):
    """`intermediate_size` is the number of hidden units of each head's scoring network, `head_dim` by default, and
    `activation` theirs, "tanh" or "relu". With `projections` "all", queries, keys, values and output each have a
    learned matrix; with "none", as in the papers, none has.
    """


class Alignment(StatesAttention):
    """Additive attention of queries, such as a decoder's states, to the annotations of a source."""

    name = "alignment"
    splits_heads = True
    summary = "additive attention of a recurrent decoder to the annotations of a source"
    paper = Paper(
        title="Neural Machine Translation by Jointly Learning to Align and Translate",
        authors="Bahdanau et al.",
        year=2015,
        arxiv="1409.0473",
    )
    equation = (
        r"e_{ij} = v^\top \tanh(W_a q_i + U_a k_j + b),\quad \alpha_i = \mathrm{softmax}(e_i),\quad"
        r" c_i = \textstyle\sum_j \alpha_{ij} v_j;" + STATES
    )
    capabilities = CROSS
    Config = AlignmentConfig
    distribution: Distribution = Softmax()

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        score = Additive(**AdditiveConfig.of(config).network)
        return AttentionSpec(heads=config.head_layout, score=score, distribution=self.distribution, cross=True)


class SoftVisual(Alignment):
    """Additive attention to the annotations of an image, whose output is scaled by a gate β computed from the query."""

    name = "visual_soft"
    summary = "soft attention to image features: their weighted mean, times a learned gate"
    paper = Paper(
        title="Show, Attend and Tell: Neural Image Caption Generation with Visual Attention",
        authors="Xu et al.",
        year=2015,
        arxiv="1502.03044",
    )
    equation = (
        r"\alpha_t = \mathrm{softmax}_i\left(v^\top \tanh(W_a k_i + W_d q_t + b)\right),\quad"
        r" \hat z_t = \sigma(W_\beta s_t) \textstyle\sum_i \alpha_{ti} v_i;" + STATES
    )

    drops_weights = True

    def inner(self, config: MechanismConfig) -> GatedAttention | GatedSamplingAttention:
        """The gates of the heads, with randomly initialised weights."""
        from attn_variants.mechanisms.alignment_layer import GatedAttention

        return GatedAttention(config.hidden_size, config.num_heads)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the attention and of the gates, which always have a bias."""
        flops = 2 * shape.batch * shape.query * config.hidden_size * config.num_heads
        gates = Cost(flops=flops, allowed_flops=flops, parameters=(config.hidden_size + 1) * config.num_heads)
        return super().cost(config, shape) + gates


@dataclass(frozen=True, kw_only=True)
class HardConfig(AlignmentConfig):
    """`mean_rate` is the fraction of training calls that use the soft weights instead of a sample."""

    mean_rate: float = checked(0.5, require_number, ge=0, le=1)


class HardVisual(SoftVisual):
    """Visual attention that reads a single annotation: a sampled one in training, otherwise the most probable one.

    In training `inner.samples` holds the samples, from which `attn_core.reinforce.reinforce_loss` computes the loss
    that trains the scores; `attn train` adds it.
    """

    name = "visual_hard"
    summary = "hard attention to image features: one location, sampled in training, the most likely one otherwise"
    equation = (
        r"s_t \sim \mathrm{Multinoulli}\left(\mathrm{softmax}_i"
        r"\left(v^\top \tanh(W_a k_i + W_d q_t + b)\right)\right),"
        r"\quad \hat z_t = \sigma(W_\beta s_t)\, v_{s_t};" + STATES
    )
    capabilities = CROSS - {Capability.EXACT}
    Config = HardConfig
    distribution = Hard()
    drops_weights = False

    def inner(self, config: MechanismConfig) -> GatedSamplingAttention:
        """The module that samples and gates, with randomly initialised weights."""
        from attn_variants.mechanisms.alignment_layer import GatedSamplingAttention

        rate = HardConfig.of(config).mean_rate
        return GatedSamplingAttention(self.spec(config), config.hidden_size, expected=rate)
