"""Hard attention drawn at random, and what makes it learn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from attn_core import Attend, AttentionSpec, InnerAttention, Operands
from attn_core.distributions import Softmax
from torch import Tensor, nn

from attn_variants.compute.plain import attention_weights, summed


@dataclasses.dataclass(frozen=True, eq=False)
class Draw:
    """What a layer drew: `log_probability` of each draw and `entropy` of what it was drawn from, in nats.

    Both are [batch, heads, query] with gradients to queries and keys, zero where a query may see nothing.
    """

    log_probability: Tensor
    entropy: Tensor


class SampledChoice(nn.Module, InnerAttention):
    """Draws one key per query while training; otherwise attends as the spec, which is hard attention.

    `drawn` is the draw of the last training pass, None before the first and after a pass that took the expectation,
    as the share `expected` of them does. Draws come from torch's generator.
    """

    def __init__(self, spec: AttentionSpec, *, expected: float) -> None:
        super().__init__()
        self.spec = spec
        self.expected = expected
        self.drawn: Draw | None = None

    def forward(self, rows: Tensor, operands: Operands, attend: Attend) -> Tensor:  # noqa: ARG002 -- as all inner modules
        """Outputs [batch, query, heads, value_size]."""
        if not self.training:
            return attend(operands)
        soft = dataclasses.replace(self.spec, distribution=Softmax())
        shares = attention_weights(soft, operands)
        if torch.rand(()).item() < self.expected:
            self.drawn = None
            return summed(self.spec, operands, shares)
        weights, self.drawn = drawn_from(shares)
        return summed(self.spec, operands, weights)

    def weights(self, rows: Tensor, operands: Operands, attend: Attend) -> Tensor:  # noqa: ARG002 -- as the base has it
        """The weights of hard attention, [batch, heads, query, key]."""
        return attend(operands)


def drawn_from(shares: Tensor) -> tuple[Tensor, Draw]:
    """One-hot weights drawn from shares [batch, heads, query, key], and the draw; empty rows stay zeros."""
    some = shares.detach().sum(-1, keepdim=True) > 0
    # A row without a key must be drawable too; what is drawn for it is thrown away.
    odds = torch.where(some, shares.detach(), 1.0).flatten(0, -2)
    places = torch.multinomial(odds, 1).view(*shares.shape[:-1], 1)
    weights = torch.zeros_like(shares).scatter(-1, places, 1.0) * some
    probability = torch.where(some, shares.gather(-1, places), 1.0)[..., 0]
    entropy = -torch.special.xlogy(shares, torch.where(shares > 0, shares, 1.0)).sum(-1)
    return weights, Draw(probability.log(), entropy)


def reinforce_loss(
    draws: Iterable[Draw],
    reward: Tensor,
    baseline: Tensor | float = 0.0,
    *,
    reward_weight: float = 1.0,
    entropy_weight: float = 0.002,
) -> Tensor:
    """What to add to a loss -mean(reward) so that its gradient reaches the scores too (Xu et al. 2015, equation 11).

    `reward` [batch], such as log p(target | draws), is taken as a constant, and so is the `baseline`, which changes the
    variance of the gradient and not its expectation: -mean(λ_r (reward - baseline) Σ log p + λ_e Σ entropy).
    """
    found = torch.zeros_like(reward)
    advantage = reward_weight * (reward - baseline).detach()
    for draw in draws:
        found = found + advantage * draw.log_probability.sum((1, 2)) + entropy_weight * draw.entropy.sum((1, 2))
    return -found.mean()


class MovingBaseline:
    """b ← decay b + (1 - decay) mean reward (Xu et al. 2015, section 4.2.1), starting at the first mean reward."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.value: float | None = None

    def update(self, reward: Tensor) -> float:
        """The baseline before these rewards [batch], which then move it."""
        mean = float(reward.detach().mean())
        before = mean if self.value is None else self.value
        self.value = self.decay * before + (1 - self.decay) * mean
        return before
