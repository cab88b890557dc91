"""Base class of linear recurrences: configuration, state and cost. Nothing here imports torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from attn_core import Capability, ComputedMechanism, Cost, Field, Heads, MechanismConfig, Shape, Slot, StateSpecs
from attn_core.kernels.recurrence import Decay, RecurrenceSpec

from attn_variants.mechanisms.computed import check_causal, multi_heads, projection_biases, projection_weights
from attn_variants.mechanisms.options import check_whole


class Update(NamedTuple):
    """How a memory is updated: what fades on its own, and whether what a key held is corrected (the delta rule)."""

    decay: Decay = "none"
    delta_rule: bool = False


def chunked_flops(heads: Heads, update: Update, tokens: int, chunk: int) -> int:
    """FLOPs of `chunked` over one sequence of `tokens` from an empty memory, two per multiply-add.

    As torch counts them: matrix products only, not the triangular systems of the delta rule (chunk² · (key_size +
    value_size) a chunk).
    """
    key, value = heads.key_size, heads.value_size
    chunks = -(-tokens // chunk)
    pairs = _pair_flops(update, key, chunk)
    out = 2 * chunk * chunk * value + 2 * chunk * key * value
    if not update.delta_rule:
        return heads.query * chunks * (pairs + out + 2 * chunk * key * value)
    each = 2 * pairs + out + 2 * chunk * key * (value + key) + 2 * chunk * key * value
    between = (chunks - 1) * 2 * key * key * value
    return heads.query * (chunks * each + between) if tokens else 0


def least_flops(heads: Heads, update: Update, tokens: int) -> int:
    """FLOPs of one token after the other: one product to write, one to read, and by the delta rule one to look up."""
    products = 3 if update.delta_rule else 2
    return tokens * products * 2 * heads.query * heads.key_size * heads.value_size


def _pair_flops(update: Update, key: int, chunk: int) -> int:
    if update.decay != "channel":
        return 2 * chunk * chunk * key
    # Every pair of different tokens of a block is met once, in one of the rounds of halving.
    block = 1 << (chunk - 1).bit_length()
    return block * (block - 1) * key


CAUSAL_ONLY = frozenset(
    {Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.PADDING, Capability.WEIGHTS}
)
"""Of recurrences whose order is part of their definition."""


class Extra(NamedTuple):
    """Weights beside queries, keys, values, output and convolution: those of linear layers, and all others."""

    linear: int = 0
    other: int = 0


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig(MechanismConfig):
    """The sizes of a head's memory, and how it is computed.

    `key_size` and `value_size` default to the mechanism's share of the head size; `chunk` tokens meet pair by pair
    and all earlier ones through the memory, which changes the speed only.
    """

    key_size: int | None = None
    value_size: int | None = None
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("chunk", self.chunk, "tokens")
        for name in ("key_size", "value_size"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), "elements")


@dataclass(frozen=True, kw_only=True)
class ConvolvedConfig(RecurrenceConfig):
    """`convolution` is the number of taps of the short convolution over queries, keys and values; 0 is none."""

    convolution: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convolution:
            check_whole("convolution", self.convolution, "taps")


class Recurrence(ComputedMechanism):
    """A linear recurrence with one memory a head; its layer is a `RecurrenceLayer`."""

    Config = RecurrenceConfig
    capabilities = CAUSAL_ONLY
    update: ClassVar[Update]

    @abstractmethod
    def extras(self, config: MechanismConfig) -> Extra:
        """The weights that only this mechanism has."""

    def key_size(self, head_size: int) -> int:
        """The default key size of a head."""
        return head_size

    def value_size(self, head_size: int) -> int:
        """The default value size of a head."""
        return head_size

    def update_of(self, config: MechanismConfig) -> Update:  # noqa: ARG002 -- most have but one
        """How the memory is updated with these options."""
        return self.update

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config.

        Raises `InvalidValue` where heads share keys, or where the order is to be ignored and is not by this mechanism,
        and `Incompatible` for rotary positions that the mechanism does not take.
        """
        if not self.can(Capability.BIDIRECTIONAL):
            check_causal(config, self.name)
        size = multi_heads(config, self.name, rotary=self.can(Capability.ROTARY)).key_size
        own = RecurrenceConfig.of(config)
        return Heads(
            query=config.heads,
            key_value=config.heads,
            key_size=own.key_size or self.key_size(size),
            value_size=own.value_size or self.value_size(size),
        )

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """What kernels are asked to compute."""
        update = self.update_of(config)
        return RecurrenceSpec(heads=self.heads(config), decay=update.decay, delta_rule=update.delta_rule)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """One memory S a head in float32, whatever the model's type, and the last inputs of a convolution."""
        heads, taps = self.heads(config), self.taps(config)
        memory = {"S": Field((heads.query, heads.key_size, heads.value_size), dtype="float32")}
        if taps:
            memory["tail"] = Field((taps - 1, channels_of(heads)))
        return {"memory": Slot(memory)}

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Projections, and the memory by chunks; keys before the queries cost nothing any more.

        As torch counts FLOPs: neither convolutions of a few taps, which are sums of scaled rows, nor the triangular
        systems of the delta rule are in them. At least, every token reads and writes the memory once.
        """
        heads, extra = self.heads(config), self.extras(config)
        weights = projection_weights(config, heads) + extra.linear
        biases = projection_biases(config, heads)
        update = self.update_of(config)
        chunks = chunked_flops(heads, update, shape.query, RecurrenceConfig.of(config).chunk)
        projected = shape.batch * shape.query * 2 * weights
        return Cost(
            flops=projected + shape.batch * chunks,
            allowed_flops=projected + shape.batch * least_flops(heads, update, shape.query),
            parameters=weights + biases + extra.other + self.taps(config) * channels_of(heads),
        )

    def taps(self, config: MechanismConfig) -> int:
        """The taps of the short convolution, 0 for none."""
        own = self.Config.of(config)
        return own.convolution if isinstance(own, ConvolvedConfig) else 0


def channels_of(heads: Heads) -> int:
    """Elements of queries, keys and values of one token."""
    return heads.query * (2 * heads.key_size + heads.value_size)
