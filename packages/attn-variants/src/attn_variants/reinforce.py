"""Hard attention that samples one key per query in training, and the REINFORCE loss that trains it.

Xu et al. 2015 (arXiv 1502.03044), section 4.1; Williams 1992.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, InnerAttention
from attn_core.distributions import Softmax
from torch import Tensor, nn

from attn_variants.compute.plain import attention_weights, summed


@dataclasses.dataclass(frozen=True, eq=False)
class SampledKeys:
    """The keys that a layer sampled in one training pass.

    `log_probability` of each sample and `entropy` of the distribution it was drawn from, in nats. Both are [batch,
    num_heads, query_len], have gradients to queries and keys, and are zero for a query that may see no key.
    """

    log_probability: Tensor
    entropy: Tensor


class SamplingAttention(InnerAttention, nn.Module):
    """In training one key per query, sampled from the softmax of the scores; otherwise hard attention, as `spec` says.

    A fraction `expected` of the training passes uses the softmax weights themselves, which lowers the variance of the
    gradient. `samples` are those of the last training pass: None before the first one and after a pass that used the
    softmax weights. Samples are drawn from torch's global generator.
    """

    def __init__(self, spec: AttentionSpec, *, expected: float) -> None:
        super().__init__()
        self.spec = spec
        self.expected = expected
        self.samples: SampledKeys | None = None

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as all inner modules
        """Outputs [batch, query_len, num_heads, value_dim]."""
        if not self.training:
            return attend(operands)
        soft = dataclasses.replace(self.spec, distribution=Softmax())
        weights = attention_weights(soft, operands)
        if torch.rand(()).item() < self.expected:
            self.samples = None
        else:
            weights, self.samples = sample_keys(weights)
        return summed(self.spec, operands, weights)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as the base has it
        """The weights of hard attention, [batch, num_heads, query_len, key_len]."""
        return attend(operands)


def sample_keys(probabilities: Tensor) -> tuple[Tensor, SampledKeys]:
    """One key per query, sampled from attention weights [batch, num_heads, query_len, key_len].

    Returns one-hot weights of the same shape, and the log probabilities and entropies. A key of probability zero is
    never sampled; a query whose probabilities are all zero gets zero weights.
    """
    any_key = probabilities.detach().sum(-1, keepdim=True) > 0
    # multinomial refuses rows of zeros: they sample from equal probabilities, and the sample is masked out below.
    odds = torch.where(any_key, probabilities.detach(), 1.0).flatten(0, -2)
    index = torch.multinomial(odds, 1).view(*probabilities.shape[:-1], 1)
    weights = torch.zeros_like(probabilities).scatter(-1, index, 1.0) * any_key
    sampled = torch.where(any_key, probabilities.gather(-1, index), 1.0)[..., 0]
    entropy = -torch.special.xlogy(probabilities, torch.where(probabilities > 0, probabilities, 1.0)).sum(-1)
    return weights, SampledKeys(sampled.log(), entropy)


def reinforce_loss(
    samples: Iterable[SampledKeys],
    reward: Tensor,
    baseline: Tensor | float = 0.0,
    *,
    reward_weight: float = 1.0,
    entropy_weight: float = 0.002,
) -> Tensor:
    """The REINFORCE loss -mean(λ_r (reward - baseline) Σ log p + λ_e Σ entropy), a scalar (Xu et al., equation 11).

    `samples` are those of every sampling layer. `reward` is [batch], such as the log likelihood of a whole output, or
    [batch, query_len], one per query; log probabilities are summed over layers and heads, and over queries where the
    reward is [batch]. Reward and baseline get no gradient. The baseline changes the variance of the gradient only.
    """
    gain = torch.zeros_like(reward)
    advantage = reward_weight * (reward - baseline).detach()
    axes = (1, 2) if reward.dim() == 1 else (1,)
    for layer in samples:
        gain = gain + advantage * layer.log_probability.sum(axes) + entropy_weight * layer.entropy.sum(axes)
    return -gain.mean()


class MovingBaseline:
    """Moving average of the mean reward: b ← decay b + (1 - decay) mean(reward) (Xu et al. 2015, section 4.2.1).

    `value` is the average so far; with `initial` None it starts at the first mean reward.
    """

    def __init__(self, decay: float = 0.9, initial: float | None = None) -> None:
        self.decay = decay
        self.value = initial

    def update(self, reward: Tensor) -> float:
        """Average these rewards in; returns the baseline before them."""
        mean = float(reward.detach().mean())
        before = mean if self.value is None else self.value
        self.value = self.decay * before + (1 - self.decay) * mean
        return before
