"""The layer of Gated DeltaNet-2."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import softplus

from attn_recurrent.gated_deltanet.layer import GatedDeltaLayer
from attn_recurrent.gated_deltanet.rule import Writes
from attn_recurrent.gated_deltanet2.config import GatedDelta2Config
from attn_recurrent.sequences import by_heads

RATES = (1.0, 16.0)
STEPS = (1e-3, 1e-1)
"""The ranges of the initial decay, as in the authors' code: rates per head, uniform; steps per channel, log-uniform."""


def fresh_decay(rates: int, steps: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Initial rates, as natural logarithms, and biases of so many steps."""
    rate = torch.empty(rates).uniform_(*RATES).log()
    low, high = (torch.tensor(size).log() for size in STEPS)
    size = torch.lerp(low, high, torch.rand(steps)).exp()
    # The inverse of softplus, so that the bias alone gives the step that was drawn.
    return nn.Parameter(rate), nn.Parameter(size + torch.log(-torch.expm1(-size)))


class GatedDelta2Layer(GatedDeltaLayer):
    """Gated DeltaNet-2 (NVIDIA 2026).

    Learned as in Gated DeltaNet, but `fade` and `gate` are two `nn.Linear` each, the last with a bias, `strength` has
    the gates that erase and then those that write, `rate` is [key_heads] and `fade_bias` [key_heads · key_size].
    """

    gating = staticmethod(torch.sigmoid)

    def __init__(self, config: GatedDelta2Config) -> None:
        super().__init__(config)
        rank, width = config.inner_size, config.hidden_size

        def low_rank(outputs: int, *, bias: bool) -> nn.Module:
            return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, outputs, bias=bias))

        self.fade, self.gate = low_rank(config.fades, bias=False), low_rank(self.sizes.out, bias=True)
        self.rate, self.fade_bias = fresh_decay(config.rates, config.fades)

    def _gates(self, fade: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        erase, write = torch.split(strength.sigmoid(), [self.sizes.into, self.sizes.out], dim=-1)
        return self._decay(fade), torch.cat([erase * self.strongest, write], dim=-1)

    def _decay(self, fade: Tensor) -> Tensor:
        """The log decays of the channels."""
        return -wide(self.rate).exp().repeat_interleave(self.sizes.key) * softplus(fade + wide(self.fade_bias))

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, strength: Tensor) -> Any:
        erase, write = torch.split(strength, [self.sizes.into, self.sizes.out], dim=-1)
        decay, erase = (self._for_each_head(by_heads(part, self.sizes.key_heads)) for part in (decay, erase))
        return Writes(query, key, by_heads(write, self.sizes.heads) * value, decay, erase * key)
