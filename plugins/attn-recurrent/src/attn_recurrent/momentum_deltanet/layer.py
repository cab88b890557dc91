"""The layer of Momentum DeltaNet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import softplus

from attn_recurrent.gated_deltanet.layer import GatedDeltaLayer
from attn_recurrent.momentum_deltanet.config import MomentumDeltaConfig
from attn_recurrent.sequences import faded


class Momentum(NamedTuple):
    """S_t = e^decay S_{t-1} - strength M_t and M_t = e^fading M_{t-1} - step k_t (v_t - e^decay S_{t-1}^T k_t)^T.

    Queries, keys and values [batch, heads, tokens, size], the others [batch, heads, tokens, 1].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    fading: Tensor
    strength: Tensor
    step: Tensor


def reaches(given: Momentum) -> tuple[Tensor, Tensor, Tensor]:
    """How much of the correction of token j the memory has after token i, and before token i but decayed by its own
    decay; and how much of the correction of j the momentum has after i: [batch, heads, tokens, tokens] each."""
    total, fading = given.decay.cumsum(2), given.fading.cumsum(2)
    ones = torch.ones_like(total) * torch.ones_like(total).transpose(-1, -2)
    kept, strength = faded(ones, total), given.strength.transpose(-1, -2)
    carried = faded(ones, fading)
    after = (kept * strength) @ carried
    return after, after - given.strength * carried, carried


def one_chunk(given: Momentum, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the memory with the momentum below it, after one chunk of tokens.

    With errors u_j, both matrices are sums of k_j u_j^T with the weights of `reaches`; a triangular system gives u.
    """
    held, momentum = memory.chunk(2, dim=2)
    after, before, carried = reaches(given)
    total, fading = given.decay.cumsum(2), given.fading.cumsum(2)
    # How much of the first momentum the memory has lost after each token, and before it.
    lost = (faded(torch.ones_like(after), total) * given.strength.transpose(-1, -2)) @ fading.exp()
    earlier = lost - given.strength * fading.exp()
    key = given.step * given.key
    start = given.value - given.key @ held * total.exp() + given.key @ momentum * earlier
    errors = torch.linalg.solve_triangular(
        (given.key @ key.transpose(-1, -2)) * before, start, upper=False, unitriangular=True
    )
    out = ((given.query @ key.transpose(-1, -2)) * after) @ errors
    out = out + given.query @ held * total.exp() - given.query @ momentum * lost
    ends = (after, carried)
    written, collected = ((key * part[:, :, -1, :, None]).transpose(-1, -2) @ errors for part in ends)
    end, faded_end = total[:, :, -1:].exp(), fading[:, :, -1:].exp()
    held, momentum = held * end - momentum * lost[:, :, -1:] + written, momentum * faded_end - collected
    return out, torch.cat([held, momentum], dim=2)


def weights(given: Momentum) -> Tensor:
    """The effective weights [batch, heads, query, key] of the values of whole sequences in the outputs."""
    after, before, _ = reaches(given)
    key = (given.step * given.key).transpose(-1, -2)
    solved: Tensor = torch.linalg.solve_triangular(
        (given.key @ key) * before, (given.query @ key) * after, upper=False, left=False, unitriangular=True
    )
    return solved


class MomentumDeltaLayer(GatedDeltaLayer):
    """Momentum DeltaNet (2026, arXiv 2605.05838).

    Learned as in Gated DeltaNet, where `fade`, `rate` and `fade_bias` have the decays of memories first and then those
    of momenta, and `strength` β first and then η; besides, `factor` [heads] and `correction` [key_heads], natural
    logarithms.
    """

    one_chunk = staticmethod(one_chunk)
    effective = staticmethod(weights)

    def __init__(self, config: MomentumDeltaConfig) -> None:
        super().__init__(config)
        self.least, self.temperature = config.min_log_mu, config.hidden_size**0.5
        self.factor = nn.Parameter(torch.empty(config.num_heads).uniform_(0.01, 4).log())
        self.correction = nn.Parameter(torch.empty(config.sizes.key_heads).uniform_(0.01, 1).log())

    def _asked(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super()._asked(query, key)
        return query - wide(self.correction).exp()[:, None, None] * key, key

    def _gates(self, fade: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        decay, fading = (-wide(self.rate).exp() * softplus(fade + wide(self.fade_bias))).chunk(2, dim=-1)
        strength, step = strength.chunk(2, dim=-1)
        step = (step / self.temperature).tanh() + 1
        share = (step * wide(self.factor).exp()).square()
        strength = strength.sigmoid() * self.strongest * share / (1 + share)
        decays = [decay - share.log1p(), fading.clamp(min=self.least)]
        return torch.cat(decays, dim=-1), torch.cat([strength, step], dim=-1)

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Momentum:
        both = (part.transpose(1, 2)[..., None].chunk(2, dim=1) for part in (decay, strength))
        return Momentum(query, key, value, *(part for pair in both for part in pair))
