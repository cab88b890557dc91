"""The options of preconditioned Kimi Delta Attention. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.checks import checked, require_number

from attn_recurrent.gated_deltanet2.config import GatedDelta2Config
from attn_recurrent.precond_deltanet.config import PrecondDeltaConfig


@dataclass(frozen=True, kw_only=True)
class PrecondKdaConfig(PrecondDeltaConfig, GatedDelta2Config):
    """The options of `precond_deltanet`; `rank` is that of the decays and of the output gates, by default the value
    size of a head. With `lower_bound` b < 0 log decays are b σ(e^a (W x + b')), as in `kda`.
    """

    lower_bound: float | None = checked(None, require_number, lt=0, optional=True)

    @property
    def rates(self) -> int:
        """A rate of decay for each head."""
        return self.num_heads

    @property
    def energies(self) -> int:
        """The number of heads whose keys have energies: all."""
        return self.num_heads

    @property
    def fades(self) -> int:
        """A decay for each channel of the memories."""
        return self.rates * self.sizes.key

    @property
    def strengths(self) -> int:
        """The strengths of the writes, one for each key head; those with which energies grow; and their decays."""
        return self.sizes.key_heads + 2 * self.energies

    @property
    def vectors(self) -> int:
        """Those of both parents, and rates and biases of the decays of energies."""
        return super().vectors + 2 * self.energies
