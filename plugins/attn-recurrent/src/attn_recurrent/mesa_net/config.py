"""The options of MesaNet. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core.checks import checked, require_number

from attn_recurrent.gated_deltanet.config import GatedDeltaConfig


@dataclass(frozen=True, kw_only=True)
class MesaConfig(GatedDeltaConfig):
    """The options of `gated_deltanet`. `lambda_lower_bound` is the least ridge, which is learned for each channel of
    the keys; systems of a `chunk` of tokens are solved at once.
    """

    by_kernels: ClassVar[bool] = False
    chunk: int = 16
    lambda_lower_bound: float = checked(0.25, require_number, gt=0, lt=1)

    @property
    def convolved(self) -> int:
        """The elements of queries and keys; values pass no convolution."""
        return 2 * self.sizes.into

    @property
    def memory(self) -> tuple[int, int, int]:
        """For each head the sums of products of keys with keys, and of keys with values."""
        return self.num_heads, self.sizes.key, self.sizes.key + self.sizes.value

    def pair_flops(self, tokens: int) -> int:
        """The products between the tokens of a chunk, for one head: the matrix of every token, and outputs."""
        return 2 * tokens**2 * (self.sizes.key**2 + self.sizes.key + self.sizes.value)

    def token_flops(self) -> int:
        """The products of a token with the memory, for one head, as read and written."""
        return 2 * self.sizes.key * (self.sizes.key + 2 * self.sizes.value)

    @property
    def gate_weights(self) -> int:
        """Decays and strengths; outputs have no gate."""
        return self.hidden_size * (self.fades + self.strengths)

    @property
    def vectors(self) -> int:
        """Biases of decays and strengths, and ridges."""
        return self.fades + self.strengths + self.num_heads * self.sizes.key
