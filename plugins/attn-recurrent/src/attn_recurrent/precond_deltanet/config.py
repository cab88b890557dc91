"""The options of Preconditioned Gated DeltaNet. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core.checks import checked, require_number

from attn_recurrent.gated_deltanet.config import GatedDeltaConfig


@dataclass(frozen=True, kw_only=True)
class PrecondDeltaConfig(GatedDeltaConfig):
    """The options of `gated_deltanet`. Scales are between 1 / `squash` and `squash`, and 1 where the logarithm of the
    energy is that of a head's center, which is learned and `center` at first; `squash_eps` is added to energies.
    """

    by_kernels: ClassVar[bool] = False
    squash: float = checked(1.5, require_number, ge=1)
    squash_eps: float = checked(1e-6, require_number, gt=0)
    center: float = -0.2

    @property
    def energies(self) -> int:
        """The number of heads whose keys have energies: those of keys."""
        return self.sizes.key_heads

    @property
    def fades(self) -> int:
        """The decays of the memories, and those of the energies."""
        return self.num_heads + self.energies

    @property
    def strengths(self) -> int:
        """The strengths of the writes, and those with which energies grow."""
        return self.num_heads + self.energies

    @property
    def memory(self) -> tuple[int, int, int]:
        """A matrix for each head, and the energies of its channels as a further column."""
        return self.num_heads, self.sizes.key, self.sizes.value + 1

    def pair_flops(self, tokens: int) -> int:
        """The products between the tokens of a chunk, for one head, those of energies among them."""
        return super().pair_flops(tokens) + 2 * tokens**2 * self.sizes.key

    @property
    def vectors(self) -> int:
        """Those of the layer without preconditioner, and the centers."""
        return super().vectors + self.energies
