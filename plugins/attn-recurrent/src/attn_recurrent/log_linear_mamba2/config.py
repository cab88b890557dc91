"""The options of log-linear Mamba-2. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.checks import checked, require_whole

from attn_recurrent.mamba2.config import Mamba2Config


@dataclass(frozen=True, kw_only=True)
class LogLinearConfig(Mamba2Config):
    """The options of `mamba2`. Of the `levels` the first is the token itself, and level l, from 1, the tokens whose
    positions differ from its own in bit l - 1 and in none above, at most 2^(l - 1); the last level has all that are
    further away, which there are after 2^(levels - 1) tokens.
    """

    levels: int = checked(15, require_whole, ge=2)

    @property
    def buckets(self) -> int:
        """The number of matrices of a head: one for each level but the first."""
        return self.levels - 1

    @property
    def further(self) -> int:
        """A weight for each level of each head."""
        return self.num_heads * self.levels

    @property
    def memory(self) -> tuple[int, ...]:
        """The shape of the memory: a matrix for each head and bucket."""
        heads, *matrix = super().memory
        return heads, self.buckets, *matrix

    @property
    def step(self) -> None:
        """No decode step is computed by kernels."""
        return
