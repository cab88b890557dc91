"""Hard attention that samples one key per query in training; the loss that trains it is in `attn_core.reinforce`.

Xu et al. 2015 (arXiv 1502.03044), section 4.1; Williams 1992.
"""

from __future__ import annotations

import dataclasses

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, InnerAttention
from attn_core.distributions import Softmax
from attn_core.reinforce import SampledKeys, SamplesKeys
from torch import Tensor, nn

from attn_variants.compute.plain import attention_weights, summed


class SamplingAttention(InnerAttention, SamplesKeys, nn.Module):
    """Samples one key per query from the softmax of the scores in training; computes `spec`, hard attention, otherwise.

    A fraction `expected` of the training passes uses the softmax weights themselves, which lowers the variance of the
    gradient; such a pass stores no `samples`. Samples are drawn from torch's global generator.
    """

    def __init__(self, spec: AttentionSpec, *, expected: float) -> None:
        super().__init__()
        self.spec = spec
        self.expected = expected

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as all inner modules
        """Outputs [batch, query_len, num_heads, value_dim]."""
        if not self.training:
            return attend(operands)
        soft = dataclasses.replace(self.spec, distribution=Softmax())
        weights = attention_weights(soft, operands)
        if torch.rand(()).item() < self.expected:
            self.keep(None)
        else:
            weights, samples = sample_keys(weights)
            self.keep(samples)
        return summed(self.spec, operands, weights)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as the base has it
        """The weights of hard attention, [batch, num_heads, query_len, key_len]."""
        return attend(operands)


def sample_keys(probabilities: Tensor) -> tuple[Tensor, SampledKeys]:
    """Sample one key per query from attention weights [batch, num_heads, query_len, key_len].

    Returns one-hot weights of the same shape, and the log probabilities and entropies. A key of probability zero is
    never sampled; a query whose probabilities are all zero gets zero weights.
    """
    any_key = probabilities.detach().sum(-1, keepdim=True) > 0
    # multinomial raises for rows of zeros: these sample uniformly, and the sample is masked out below.
    odds = torch.where(any_key, probabilities.detach(), 1.0).flatten(0, -2)
    index = torch.multinomial(odds, 1).view(*probabilities.shape[:-1], 1)
    weights = torch.zeros_like(probabilities).scatter(-1, index, 1.0) * any_key
    sampled = torch.where(any_key, probabilities.gather(-1, index), 1.0)[..., 0]
    entropy = -torch.special.xlogy(probabilities, torch.where(probabilities > 0, probabilities, 1.0)).sum(-1)
    return weights, SampledKeys(sampled.log(), entropy)
