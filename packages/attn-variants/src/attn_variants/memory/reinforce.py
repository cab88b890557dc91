"""Learning where to look from how well it went (REINFORCE; Williams 1992, as Xu et al. 2015, section 4.1, use it)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Glimpses:
    """What was drawn: the logarithm of its chance and the entropy of the chances, [batch, heads, query] each."""

    log_chance: Tensor
    entropy: Tensor


class MovingBaseline:
    """The reward to expect: b <- 0.9 b + 0.1 mean reward, zero at first. What is no better teaches nothing."""

    def __init__(self, keep: float = 0.9) -> None:
        self.keep = keep
        self.value = 0.0

    def update(self, reward: Tensor) -> None:
        """Take in some rewards, such as the log-likelihoods of a batch's words."""
        self.value = self.keep * self.value + (1 - self.keep) * reward.detach().mean().item()


def reinforce_loss(
    glimpses: Glimpses, reward: Tensor, baseline: MovingBaseline, *, reward_weight: float = 1.0, entropy: float = 0.002
) -> Tensor:
    """The loss, a scalar, whose gradient is minus λ_r (r - b) ∂ log p(s) + λ_e ∂H(s), mean over batch and queries.

    `reward` [batch, query] is taken as it is: no gradient passes through it here. Add the loss of the words themselves.
    """
    better = (reward.detach() - baseline.value)[:, None]
    gained = reward_weight * better * glimpses.log_chance + entropy * glimpses.entropy
    return -gained.sum(1).mean()
