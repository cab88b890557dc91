"""The options of Mamba-2, and the sizes that follow from them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrent_step import RecurrentStepSpec


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MechanismConfig):
    """`state_size` is the size of B and C, `groups` the number of groups of heads that share them; the x of a head is
    `expand` times as wide as the head.

    `taps` is the width of the convolution; `chunk`, the number of tokens that are computed pairwise, only changes the
    speed. `norm_eps` is added to the mean squares of the last norm.
    """

    state_size: int = checked(128, require_whole, ge=1)
    groups: int = checked(1, require_whole, ge=1)
    expand: int = checked(2, require_whole, ge=1)
    taps: int = checked(4, require_whole, ge=1)
    chunk: int = checked(64, require_whole, ge=1)
    norm_eps: float = checked(1e-5, require_number, gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.groups:
            raise InvalidValue.of("groups", self.groups, f"a divisor of the {self.num_heads} heads")

    @property
    def head(self) -> int:
        """The number of elements of x of one head."""
        return self.expand * self.head_layout.value_size

    @property
    def inner(self) -> int:
        """The number of elements of x of all heads."""
        return self.num_heads * self.head

    @property
    def channels(self) -> int:
        """The number of elements that pass the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def further(self) -> int:
        """The number of outputs of the first linear layer after gate, x, B, C and step sizes."""
        return 0

    @property
    def memory(self) -> tuple[int, ...]:
        """The shape of the memory: a matrix for each head."""
        return self.num_heads, self.state_size, self.head

    @property
    def step(self) -> RecurrentStepSpec | None:
        """The decode step that a layer requests from kernels, where C, B and x are queries, keys and values."""
        return RecurrentStepSpec(
            num_heads=self.num_heads,
            num_key_heads=self.groups,
            key_size=self.state_size,
            value_size=self.head,
            taps=self.taps,
            feature_map="silu",
            decay="head",
            decay_form="softplus",
            step_size=True,
            skip=True,
            norm_heads=self.num_heads // self.groups,
            gate="silu",
            norm_before_gate=False,
        )
