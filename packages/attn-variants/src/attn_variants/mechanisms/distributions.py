"""Attention with distributions other than softmax: sparsemax, entmax, sigmoid, sinks, stick-breaking, hard."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    DeclaredMechanism,
    InnerAttention,
    MechanismConfig,
    Paper,
    Window,
)
from attn_core.checks import checked, require_number, require_whole
from attn_core.distributions import (
    AdaptiveEntmax,
    Entmax,
    Hard,
    Sigmoid,
    SoftmaxOne,
    SoftmaxWithSink,
    Sparsemax,
    StickBreaking,
)
from attn_core.norms import QkNorm
from attn_core.scores import ScaledDot

from attn_variants.mechanisms.common import CHOOSING, GROUPED_SELF, UNNORMALISED, self_attention, window_mask


class SparsemaxAttention(DeclaredMechanism):
    """Scaled dot-product attention that gives most keys a weight of exactly zero."""

    name = "sparsemax"
    summary = "scores are projected onto the probability simplex, which makes most weights zero"
    paper = Paper(
        title="From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label Classification",
        authors="Martins and Astudillo",
        year=2016,
        arxiv="1602.02068",
    )
    equation = (
        r"\alpha_i = \arg\min_{p \in \Delta} \left\lVert p - \frac{K q_i}{\sqrt{d_k}} \right\rVert^2,\quad"
        r" o_i = \alpha_i^\top V"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, distribution=Sparsemax())


LARGEST_ALPHA = 32


class EntmaxAttention(DeclaredMechanism):
    """Sparse weights between softmax (towards α = 1) and sparsemax (α = 2)."""

    name = "entmax"
    summary = "sparse weights between softmax and sparsemax"
    paper = Paper(
        title="Sparse Sequence-to-Sequence Models",
        authors="Peters et al.",
        year=2019,
        arxiv="1905.05702",
    )
    equation = (
        r"\alpha\text{-entmax}(e)_j = \left[(\alpha - 1) e_j - \tau\right]_+^{1/(\alpha - 1)},\quad"
        r" e = Q K^\top / \sqrt{d_k} + M"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`alpha` is above 1; the threshold for 1.5 is found exactly, for others by bisection to full precision."""

        alpha: float = checked(1.5, require_number, gt=1, le=LARGEST_ALPHA)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        alpha = self.Config.of(config).alpha
        return self_attention(config, distribution=Entmax(alpha=alpha))


class AdaptiveEntmaxAttention(DeclaredMechanism):
    """α-entmax with a learned α per head: some heads become sparse, others stay near softmax."""

    name = "adaptive_entmax"
    summary = "every head learns how sparse its weights are"
    paper = Paper(
        title="Adaptively Sparse Transformers",
        authors="Correia et al.",
        year=2019,
        arxiv="1909.00015",
    )
    equation = (
        r"\alpha_h = 1 + \sigma(a_h),\quad"
        r" O_h = \alpha_h\text{-entmax}(Q_h K_h^\top / \sqrt{d_k} + M) V_h"
    )
    capabilities = GROUPED_SELF

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, distribution=AdaptiveEntmax())


class SigmoidAttention(DeclaredMechanism):
    """Weights each key by the sigmoid of its score less the log of the number of keys; rows need not sum to one."""

    name = "sigmoid"
    summary = "each weight is a sigmoid of its own score, without normalisation over the keys"
    paper = Paper(
        title="Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
        authors="Ramapuram et al.",
        year=2024,
        arxiv="2409.04431",
    )
    equation = (
        r"O = \sigma\left(\frac{Q K^\top}{\sqrt{d_k}} - \ln n\right) V,\quad"
        r" n = \text{allowed keys}"
    )
    capabilities = UNNORMALISED

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, distribution=Sigmoid())


class SinkAttention(DeclaredMechanism):
    """Softmax with a learned logit per head in the denominator, a sink for weight that goes to no key."""

    name = "sink"
    summary = "softmax with a learned extra logit per head in the denominator"
    used_by = ("gpt-oss",)
    paper = Paper(
        title="gpt-oss-120b and gpt-oss-20b Model Card",
        authors="OpenAI",
        year=2025,
        arxiv="2508.10925",
    )
    equation = (
        r"\alpha_{ij} = \frac{\exp(e_{ij})}{\exp(s_h) + \sum_k \exp(e_{ik})},\quad"
        r" e = Q_h K_h^\top / \sqrt{d_k}"
    )
    capabilities = UNNORMALISED

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`window` is the number of visible tokens, including the query's own, as in every other layer of gpt-oss; None
        for all tokens. `norm_eps` is that of norms of queries and keys (Flint), None for none; `scale` replaces 1/√d_k
        (Granite).
        """

        window: int | None = checked(None, require_whole, ge=1, unit="tokens", optional=True)
        norm_eps: float | None = checked(None, require_number, gt=0, optional=True)
        scale: float | None = checked(None, require_number, gt=0, optional=True)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        own = self.Config.of(config)
        return self_attention(
            config,
            score=ScaledDot(scale=own.scale),
            mask=window_mask(config, own.window),
            distribution=SoftmaxWithSink(),
            norm=None if own.norm_eps is None else QkNorm(eps=own.norm_eps),
        )


class SoftmaxOneAttention(DeclaredMechanism):
    """Softmax with 1 added to the denominator, so that a head may attend to nothing."""

    name = "softmax_one"
    summary = "softmax with 1 added to the denominator"
    paper = Paper(
        title="Attention Is Off By One",
        authors="Miller",
        year=2023,
    )
    equation = (
        r"\alpha_{ij} = \frac{\exp(e_{ij})}{1 + \sum_k \exp(e_{ik})},\quad"
        r" e = Q K^\top / \sqrt{d_k}"
    )
    capabilities = UNNORMALISED

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, distribution=SoftmaxOne())


class StickBreakingAttention(DeclaredMechanism):
    """Each key takes a fraction of the weight that later keys left, from the key next to the query backwards.

    It needs no positional encoding. A query does not see itself, so that the output of the first is zero.
    """

    name = "stick_breaking"
    summary = "the nearest key takes its share of the weight first, earlier keys take shares of what is left"
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
        """The spec; raises `Incompatible` unless causal, `InvalidValue` unless the key/value heads divide the heads."""
        earlier = Causal() & ~Window(left=0)
        return AttentionSpec(heads=config.head_layout, distribution=StickBreaking(), mask=earlier, rotary=config.rotary)


SHOW_ATTEND_TELL = Paper(
    title="Show, Attend and Tell: Neural Image Caption Generation with Visual Attention",
    authors="Xu et al.",
    year=2015,
    arxiv="1502.03044",
)


class HardAttention(DeclaredMechanism):
    """Puts all weight on the key with the largest score.

    The choice has no gradient, so values are trained but not queries and keys; `sampled` is the form for training.
    """

    name = "hard"
    summary = "all weight on the key with the largest score"
    paper = SHOW_ATTEND_TELL
    equation = (
        r"o_i = v_{j^*},\quad"
        r" j^* = \arg\max_j q_i^\top k_j"
    )
    capabilities = CHOOSING

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, distribution=Hard())


class SampledAttention(DeclaredMechanism):
    """Attends to one key per query: sampled from the softmax of the scores in training, else that of the largest score.

    Values get the gradient of the sampled keys. Queries and keys are trained by REINFORCE: the layer stores the log
    probabilities of its samples in `inner.samples`, and `attn train` adds `attn_core.reinforce.reinforce_loss` of these
    samples and the reward to the loss.
    """

    name = "sampled"
    splits_heads = True
    summary = "one key per query, drawn while training and learned by REINFORCE"
    paper = SHOW_ATTEND_TELL
    equation = (
        r"s_i \sim \mathrm{Multinoulli}(\mathrm{softmax}(K q_i / \sqrt{d_k})),\quad o_i = v_{s_i},\quad"
        r" \nabla \approx (R - b) \nabla \log p(s)"
    )
    capabilities = CHOOSING

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`expected` is the fraction of training passes that use the expectation, not a sample, as in Xu et al."""

        expected: float = checked(0.5, require_number, ge=0, le=1)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention spec; raises `InvalidValue` unless the key/value heads divide the heads."""
        return self_attention(config, distribution=Hard())

    def inner(self, config: MechanismConfig) -> InnerAttention:
        """The module that samples keys."""
        from attn_variants.reinforce import SamplingAttention

        expected = self.Config.of(config).expected
        return SamplingAttention(self.spec(config), expected=expected)
