"""The layer of MesaNet."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

from attn_recurrent.gated_deltanet.layer import GatedDeltaLayer
from attn_recurrent.mesa_net.config import MesaConfig
from attn_recurrent.sequences import faded


class Regression(NamedTuple):
    """Queries, keys and ridges [batch, heads, tokens, key_size], values [batch, heads, tokens, value_size], log decays
    and strengths [batch, heads, tokens, 1]."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor
    ridge: Tensor


def solved(given: Regression, total: Tensor, before: Tensor | None) -> Tensor:
    """(G_t + diag(λ))^-1 q_t [batch, heads, tokens, key_size]; `before` [batch, heads, key_size, key_size] is G before
    the first token, zero if None, and `total` the sums of log decays."""
    ones = torch.ones_like(total) * torch.ones_like(total).transpose(-1, -2)
    outer = (given.strength * given.key)[..., None] * given.key[..., None, :]
    sums = torch.unflatten(faded(ones, total) @ outer.flatten(-2), -1, outer.shape[-2:])
    if before is not None:
        sums = sums + total.exp()[..., None] * before[:, :, None]
    # Symmetric and positive definite, as ridges are at least their lower bound, unless there is a number that is none,
    # which stays in its sequence.
    factor, failed = torch.linalg.cholesky_ex(sums + torch.diag_embed(given.ridge))
    found = torch.cholesky_solve(given.query[..., None], factor)[..., 0]
    return found.masked_fill(failed[..., None] != 0, torch.nan)


def one_chunk(given: Regression, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs, and the memory G and H [batch, heads, key_size, key_size + value_size] after one chunk of tokens."""
    size, total = given.key.shape[-1], given.decay.cumsum(2)
    asked = solved(given, total, memory[..., :size])
    key = given.strength * given.key
    out = faded(asked @ key.transpose(-1, -2), total) @ given.value + (asked * total.exp()) @ memory[..., size:]
    last = total[:, :, -1:]
    written = (key * (last - total).exp()).transpose(-1, -2) @ torch.cat([given.key, given.value], dim=-1)
    return out, memory * last.exp() + written


def weights(given: Regression) -> Tensor:
    """The effective weights [batch, heads, query, key] of the values of whole sequences in the outputs."""
    total = given.decay.cumsum(2)
    asked = solved(given, total, None)
    return faded(asked @ (given.strength * given.key).transpose(-1, -2), total)


def no_gate(rows: Tensor) -> Tensor:
    """1, by which outputs are multiplied."""
    return rows.new_ones(())


class MesaLayer(GatedDeltaLayer):
    """MesaNet (von Oswald et al. 2025, arXiv 2506.05233), without an output gate, as by default in the authors' code.

    Learned as in Gated DeltaNet, but there is no `gate` and no `rate`, `strength` has a bias, and `filters` are those
    of queries and keys; besides, `ridge` [heads · key_size].
    """

    gating = staticmethod(no_gate)
    one_chunk = staticmethod(one_chunk)
    effective = staticmethod(weights)

    def __init__(self, config: MesaConfig) -> None:
        super().__init__(config)
        self.strength = nn.Linear(config.hidden_size, config.strengths)
        self.gate = nn.Identity()
        del self.rate
        self.least = config.lambda_lower_bound
        # Ridges are 1 at first, by the inverse of softplus.
        start = math.log(math.expm1(1 - self.least))
        self.ridge = nn.Parameter(torch.full((self.sizes.heads * self.sizes.key,), start))

    def _gates(self, fade: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        return logsigmoid(fade + wide(self.fade_bias)), strength.sigmoid() * self.strongest

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Regression:
        decay, strength = (part.transpose(1, 2)[..., None] for part in (decay, strength))
        ridge = (softplus(wide(self.ridge)) + self.least).view(self.sizes.heads, 1, -1).expand_as(key)
        # Gated DeltaNet divides queries by √key_size.
        return Regression(query * self.sizes.key**0.5, key, value, decay, strength, ridge)
