"""The options of Momentum DeltaNet. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core.checks import checked, require_number

from attn_recurrent.gated_deltanet.config import GatedDeltaConfig


@dataclass(frozen=True, kw_only=True)
class MomentumDeltaConfig(GatedDeltaConfig):
    """The options of `gated_deltanet`. The logarithm of a momentum's decay is at least `min_log_mu`."""

    by_kernels: ClassVar[bool] = False
    min_log_mu: float = checked(-2.0, require_number, le=0)

    @property
    def fades(self) -> int:
        """The decays of memories, and those of momenta."""
        return 2 * self.num_heads

    @property
    def strengths(self) -> int:
        """The strengths of steps, and those of errors."""
        return 2 * self.num_heads

    @property
    def memory(self) -> tuple[int, int, int]:
        """For each head the memory, and below it the momentum."""
        return self.num_heads, 2 * self.sizes.key, self.sizes.value

    def pair_flops(self, tokens: int) -> int:
        """The products between the tokens of a chunk, for one head, those of decays among them."""
        return super().pair_flops(tokens) + 2 * tokens**3 + 2 * tokens**2

    def token_flops(self) -> int:
        """The products of a token with memory and momentum, for one head."""
        return 2 * super().token_flops()

    @property
    def vectors(self) -> int:
        """Those of `gated_deltanet`, a factor for each head, and a correction for each key head."""
        return super().vectors + self.num_heads + self.sizes.key_heads
