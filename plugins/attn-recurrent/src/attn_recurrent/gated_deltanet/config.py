"""The options of Gated DeltaNet, and the sizes that follow from them. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from attn_core import (
    MechanismConfig,
)
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrent_step import RecurrentStepSpec


class Sizes(NamedTuple):
    """`heads` memories of `key` times `value` elements each, and `key_heads` queries and keys of `key` elements; with
    several `writes` a token has so many keys and values."""

    heads: int
    key_heads: int
    key: int
    value: int
    writes: int = 1

    @property
    def into(self) -> int:
        """The number of elements of all queries of a token, and of the keys of one write."""
        return self.key_heads * self.key

    @property
    def out(self) -> int:
        """The number of elements of the values of one write."""
        return self.heads * self.value

    @property
    def channels(self) -> int:
        """The number of elements of all queries, keys and values of a token."""
        return self.into + self.writes * (self.into + self.out)


def gated_delta_step(sizes: Sizes, taps: int) -> RecurrentStepSpec:
    """The decode step that a layer requests from kernels."""
    return RecurrentStepSpec(
        num_heads=sizes.heads,
        num_key_heads=sizes.key_heads,
        key_size=sizes.key,
        value_size=sizes.value,
        taps=taps,
        feature_map="silu",
        unit=True,
        decay="head",
        decay_form="softplus",
        delta_rule=True,
        norm_heads=1,
        gate="silu",
    )


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(MechanismConfig):
    """`value_size` of a head, by default its key size; `taps` is the width of the convolution; `chunk` only changes the
    speed.

    `key_heads`, by default the number of heads, is the number of queries and keys of a token: neighbouring heads, each
    with its own values, gates and memory, share them (Qwen3-Next). `norm_eps` is that of the output norm. With
    `allow_neg_eigval`, strengths are doubled, so that a state can be negated as well as erased (OLMo Hybrid; Grazzi et
    al. 2024, arXiv 2411.12537).
    """

    value_size: int | None = checked(None, require_whole, ge=1, optional=True)
    taps: int = checked(4, require_whole, ge=1)
    chunk: int = checked(64, require_whole, ge=1)
    key_heads: int | None = checked(None, require_whole, ge=1, optional=True)
    norm_eps: float = checked(1e-5, require_number, ge=0)
    allow_neg_eigval: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % (self.key_heads or self.num_heads):
            raise InvalidValue.of("key_heads", self.key_heads, f"a divisor of the {self.num_heads} heads")

    by_kernels: ClassVar[bool] = True
    """Whether kernels may compute the rule."""

    @property
    def writes(self) -> int:
        """The number of keys and values of a token."""
        return 1

    @property
    def fades(self) -> int:
        """The number of decays of a token."""
        return self.num_heads

    @property
    def strengths(self) -> int:
        """The number of strengths of a token."""
        return self.writes * self.num_heads

    @property
    def convolved(self) -> int:
        """The number of elements of a token that pass the convolution."""
        return self.sizes.channels

    @property
    def memory(self) -> tuple[int, int, int]:
        """The shape of the memory: a matrix for each head."""
        return self.num_heads, self.sizes.key, self.sizes.value

    @property
    def gate_weights(self) -> int:
        """The number of weights of the linear layers of decays, strengths and output gates."""
        return self.hidden_size * (self.sizes.out + self.fades + self.strengths)

    @property
    def vectors(self) -> int:
        """The number of parameters of no linear layer, but for filters and the norm: rates and biases of decays."""
        return 2 * self.fades

    def pair_flops(self, tokens: int) -> int:
        """The products between the tokens of a chunk, for one head."""
        return 2 * tokens**2 * (2 * self.sizes.key + self.sizes.value)

    def token_flops(self) -> int:
        """The products of a token with the memory, for one head."""
        return 3 * 2 * self.sizes.key * self.sizes.value

    @property
    def step(self) -> RecurrentStepSpec | None:
        """The decode step that kernels may compute; none does if strengths are doubled."""
        doubled = self.allow_neg_eigval
        return gated_delta_step(self.sizes, self.taps) if self.by_kernels and not doubled else None

    @property
    def sizes(self) -> Sizes:
        """The numbers and sizes of heads."""
        size = self.head_layout.key_size
        return Sizes(self.num_heads, self.key_heads or self.num_heads, size, self.value_size or size, self.writes)
