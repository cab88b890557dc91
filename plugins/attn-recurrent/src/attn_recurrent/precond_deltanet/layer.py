"""The layer of preconditioned Gated DeltaNet."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from attn_core.masking import wide
from torch import Tensor, nn

from attn_recurrent.gated_deltanet.layer import GatedDeltaLayer
from attn_recurrent.gated_deltanet.rule import Writes, met, one_chunk
from attn_recurrent.precond_deltanet.config import PrecondDeltaConfig
from attn_recurrent.sequences import faded


class Preconditioned(NamedTuple):
    """The inputs of the rule [batch, heads, tokens, ...], as of `Rule`; `fading` [..., 1] are the log decays of
    energies, `gain` [..., 1] the strengths with which they grow, and `center` [..., 1] what their logarithms are
    compared with."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor
    fading: Tensor
    gain: Tensor
    center: Tensor


class PrecondDeltaLayer(GatedDeltaLayer):
    """Gated DeltaNet whose keys are written with a diagonal preconditioner.

    Learned as in Gated DeltaNet, where `fade`, `strength`, `rate` and `fade_bias` have those of memories first and then
    those of energies; besides, `center` [key_heads].
    """

    def __init__(self, config: PrecondDeltaConfig) -> None:
        super().__init__(config)
        self.squash, self.squash_eps = math.log(config.squash), config.squash_eps
        self.center = nn.Parameter(torch.full((config.energies,), float(config.center)))

    def _gates(self, fade: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        decay, strength = super()._gates(fade, strength)
        heads = self.sizes.heads
        # Only the strengths of writes are doubled.
        return decay, torch.cat([strength[..., :heads], strength[..., heads:] / self.strongest], dim=-1)

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Preconditioned:
        both = [self.sizes.heads, self.sizes.key_heads]
        (decay, fading), (strength, gain) = (
            torch.split(part.transpose(1, 2)[..., None], both, dim=1) for part in (decay, strength)
        )
        energies = (self._for_each_head(part) for part in (fading, gain, self._center(gain)))
        return Preconditioned(query, key, value, decay, strength, *energies)

    def _center(self, gain: Tensor) -> Tensor:
        return wide(self.center)[:, None, None].expand_as(gain)

    def written(self, given: Preconditioned, energy: Tensor | None) -> tuple[Tensor, Tensor]:
        """The keys as they are written, and the energies after the tokens, both [batch, heads, tokens, key_size];
        `energy` [batch, heads, key_size] is that before them, zero if None."""
        total = given.fading.cumsum(2)
        pairs = faded(torch.ones_like(total) * torch.ones_like(total).transpose(-1, -2), total)
        energies = pairs @ (given.gain * given.key.square())
        if energy is not None:
            energies = energies + total.exp() * energy[:, :, None]
        apart = (energies + self.squash_eps).log() - given.center
        return given.key * (-self.squash * apart / (1 + apart.abs())).exp(), energies

    def one_chunk(self, given: Preconditioned, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, and the memory with its column of energies, after one chunk of tokens."""
        memory, energy = memory[..., :-1], memory[..., -1]
        key, energies = self.written(given, energy)
        strength = given.strength
        out, memory = one_chunk(
            Writes(given.query, key, strength * given.value, given.decay, strength * given.key), memory
        )
        return out, torch.cat([memory, energies[:, :, -1, :, None]], dim=-1)

    def effective(self, given: Preconditioned) -> Tensor:
        """The effective weights [batch, heads, query, key] of the values of whole sequences in the outputs."""
        key, total = self.written(given, None)[0], given.decay.cumsum(2)
        reach, erased = met(given.query, key, total), met(given.key, key, total, reach=-1)
        solved: Tensor = torch.linalg.solve_triangular(
            given.strength * erased, reach, upper=False, left=False, unitriangular=True
        )
        return solved * given.strength.transpose(-1, -2)
