"""The layer of preconditioned Kimi Delta Attention."""

from __future__ import annotations

import torch
from attn_core.masking import wide
from torch import Tensor
from torch.nn.functional import softplus

from attn_recurrent.gated_deltanet2.layer import GatedDelta2Layer, fresh_decay
from attn_recurrent.precond_deltanet.layer import PrecondDeltaLayer, Preconditioned
from attn_recurrent.precond_kda.config import PrecondKdaConfig
from attn_recurrent.sequences import by_heads


class PrecondKdaLayer(PrecondDeltaLayer, GatedDelta2Layer):
    """Kimi Delta Attention whose keys are written with a diagonal preconditioner.

    Learned as in Gated DeltaNet-2, where `rate` is [heads] and `fade_bias` [heads · key_size], and `strength` has the
    strengths of key heads, those with which the energies of heads grow, and their decays; besides, `center`,
    `energy_rate`, as natural logarithms, and `energy_bias` [heads].
    """

    def __init__(self, config: PrecondKdaConfig) -> None:
        super().__init__(config)
        self.bound = config.lower_bound
        self.energy_rate, self.energy_bias = fresh_decay(config.energies, config.energies)

    def _gates(self, fade: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        heads, shared = self.sizes.heads, self.sizes.key_heads
        write, gain, fading = torch.split(strength, [shared, heads, heads], dim=-1)
        write = (write.sigmoid() * self.strongest).repeat_interleave(heads // shared, dim=-1)
        fading = -wide(self.energy_rate).exp() * softplus(fading + wide(self.energy_bias))
        return self._decay(fade), torch.cat([write, gain.sigmoid(), fading], dim=-1)

    def _decay(self, fade: Tensor) -> Tensor:
        if self.bound is None:
            return super()._decay(fade)
        rates = wide(self.rate).exp().repeat_interleave(self.sizes.key)
        return self.bound * torch.sigmoid(rates * (fade + wide(self.fade_bias)))

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Preconditioned:
        write, gain, fading = strength.transpose(1, 2)[..., None].chunk(3, dim=1)
        decay = by_heads(decay, self.sizes.heads)
        return Preconditioned(query, key, value, decay, write, fading, gain, self._center(gain))
