"""The options of Gated DeltaNet-2. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core.checks import checked, require_whole

from attn_recurrent.gated_deltanet.config import GatedDeltaConfig


@dataclass(frozen=True, kw_only=True)
class GatedDelta2Config(GatedDeltaConfig):
    """The options of `gated_deltanet`; `allow_neg_eigval` doubles the gates that erase. `rank` is that of the decays
    and of the output gates, by default the value size of a head.
    """

    by_kernels: ClassVar[bool] = False
    rank: int | None = checked(None, require_whole, ge=1, unit="units", optional=True)

    @property
    def inner_size(self) -> int:
        """The rank of decays and output gates."""
        return self.rank or self.sizes.value

    @property
    def rates(self) -> int:
        """A rate of decay for each key head."""
        return self.sizes.key_heads

    @property
    def fades(self) -> int:
        """A decay for each channel of the keys."""
        return self.rates * self.sizes.key

    @property
    def strengths(self) -> int:
        """A gate for each channel of the keys, which erases, and one for each of the values, which writes."""
        return self.sizes.into + self.sizes.out

    def pair_flops(self, tokens: int) -> int:
        """The products between the tokens of a chunk, for one head: pairs of keys once, in a round of halving."""
        block = 1 << max(0, tokens - 1).bit_length()
        return 2 * block * (block - 1) * self.sizes.key + 2 * tokens**2 * self.sizes.value

    @property
    def gate_weights(self) -> int:
        """Decays and output gates of a low rank, and full gates of keys and values."""
        return self.hidden_size * self.strengths + self.inner_size * (
            2 * self.hidden_size + self.fades + self.sizes.out
        )

    @property
    def vectors(self) -> int:
        """Rates, and biases of decays and of output gates."""
        return self.rates + self.fades + self.sizes.out
