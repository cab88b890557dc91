"""Hard attention that is trained by sampling."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, InnerAttention, MechanismConfig, Paper
from attn_core.distributions import Hard
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.capabilities import CHOOSING
from attn_variants.mechanisms.masks import self_mask


class SampledAttention(DeclaredMechanism):
    """One key per query, drawn with the softmax of the scores while training, of the largest score otherwise.

    Values get the gradient of the sampled keys. Queries and keys get theirs by REINFORCE: the layer keeps the log
    probabilities of its samples in `inner.samples`, and the training loop adds `attn_variants.reinforce.reinforce_loss`
    of these samples and the reward to the loss.
    """

    name = "sampled"
    summary = "one key per query, drawn while training and learned by REINFORCE"
    paper = Paper(
        title="Show, Attend and Tell: Neural Image Caption Generation with Visual Attention",
        authors="Xu et al.",
        year=2015,
        arxiv="1502.03044",
    )
    equation = (
        r"s_i \sim \mathrm{Multinoulli}(\mathrm{softmax}(K q_i / \sqrt{d_k})),\quad o_i = v_{s_i},\quad"
        r" \nabla \approx (R - b) \nabla \log p(s)"
    )
    capabilities = CHOOSING

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`expected` is the share of training passes that take the expectation in place of a draw, as Xu et al. do."""

        expected: float = 0.5

        def __post_init__(self) -> None:
            super().__post_init__()
            if not 0 <= self.expected <= 1:
                raise InvalidValue.of("expected", self.expected, "a probability, 0 to 1")

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        heads = config.head_layout
        return AttentionSpec(heads=heads, distribution=Hard(), mask=self_mask(config), rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> InnerAttention:
        """The module that draws."""
        from attn_variants.reinforce import SamplingAttention

        expected = self.Config.of(config).expected
        return SamplingAttention(self.spec(config), expected=expected)
