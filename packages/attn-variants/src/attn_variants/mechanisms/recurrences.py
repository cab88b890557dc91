"""Linear attention as a recurrence: linear attention, RetNet, GLA, lightning attention, DeltaNet and KDA."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    Heads,
    MechanismConfig,
    Paper,
    Rotary,
    Shape,
    Slot,
    StateSpecs,
    Step,
)
from attn_core.checks import require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrence import Decay, RecurrenceSpec
from attn_core.kernels.recurrent_step import RecurrentStepSpec

from attn_variants.mechanisms.common import BASIC, projection_biases, projection_weights
from attn_variants.mechanisms.decode_steps import (
    delta_step,
    gated_linear_step,
    kimi_delta_step,
    lightning_step,
    retention_step,
)


class Update(NamedTuple):
    """How a memory is updated: what fades on its own, and whether what a key held is corrected (the delta rule)."""

    decay: Decay = "none"
    delta_rule: bool = False


class RecurrencePrice(NamedTuple):
    """FLOPs of a recurrence over one sequence, two per multiply-add: of the plain computation, and at least.

    As torch counts them: matrix products only, not the triangular systems of the delta rule (chunk² · (key_size +
    value_size) a chunk), nor writing a single token, which is no matrix product.
    """

    flops: int
    least: int


def recurrence_price(heads: Heads, update: Update, shape: Shape | Step, chunk: int) -> RecurrencePrice:
    """The price of whole sequences, or of a step: its tokens by chunks, or, if it is one, what that token reads."""
    if isinstance(shape, Step) and shape.new == 1:
        read = (2 if update.delta_rule else 1) * 2 * heads.query * heads.key_size * heads.value_size
        return RecurrencePrice(read, read)
    flops = chunked_flops(heads, update, shape.query, chunk, memory=isinstance(shape, Step))
    return RecurrencePrice(flops, least_flops(heads, update, shape.query))


def chunked_flops(heads: Heads, update: Update, tokens: int, chunk: int, *, memory: bool) -> int:
    """FLOPs of `chunked` over one sequence of `tokens`, from an empty memory or from one that it is given."""
    key, value = heads.key_size, heads.value_size
    chunks = -(-tokens // chunk)
    pairs = _pair_flops(update, key, chunk)
    out = 2 * chunk * chunk * value + 2 * chunk * key * value
    if not update.delta_rule:
        return heads.query * chunks * (pairs + out + 2 * chunk * key * value)
    each = 2 * pairs + out + 2 * chunk * key * (value + key) + 2 * chunk * key * value
    between = (chunks if memory else chunks - 1) * 2 * key * key * value
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


CAUSAL_ONLY = BASIC | frozenset(
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
        require_whole("chunk", self.chunk, ge=1, unit="tokens")
        for name in ("key_size", "value_size"):
            require_whole(name, getattr(self, name), ge=1, unit="elements", optional=True)


@dataclass(frozen=True, kw_only=True)
class ConvolvedConfig(RecurrenceConfig):
    """`convolution` is the number of taps of the short convolution over queries, keys and values; 0 is none."""

    convolution: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convolution:
            require_whole("convolution", self.convolution, ge=1, unit="taps")


class Recurrence(ComputedMechanism):
    """A linear recurrence with one memory a head; its layer is a `RecurrenceLayer`."""

    Config = RecurrenceConfig
    capabilities = CAUSAL_ONLY
    update: ClassVar[Update]
    splits_heads = True

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """Queries, keys and values, which one convolution passes over."""
        heads = self.heads(config)
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        return {"convolution.weight": (into, into, out)}

    @abstractmethod
    def extras(self, config: MechanismConfig) -> Extra:
        """The weights that only this mechanism has."""

    def key_size(self, head_dim: int) -> int:
        """The default key size of a head."""
        return head_dim

    def value_size(self, head_dim: int) -> int:
        """The default value size of a head."""
        return head_dim

    def update_of(self, config: MechanismConfig) -> Update:  # noqa: ARG002 -- most have but one
        """How the memory is updated with these options."""
        return self.update

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config."""
        size = config.head_layout.key_size
        own = RecurrenceConfig.of(config)
        return Heads(
            query=config.num_heads,
            key_value=config.num_heads,
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

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Projections, and the memory by chunks; remembered tokens cost nothing any more.

        Convolutions of a few taps are sums of scaled rows and no matrix products. At least, every token reads and
        writes the memory once.
        """
        heads, extra = self.heads(config), self.extras(config)
        weights = projection_weights(config, heads) + extra.linear
        biases = projection_biases(config, heads)
        update = self.update_of(config)
        price = recurrence_price(heads, update, shape, RecurrenceConfig.of(config).chunk)
        projected = shape.batch * shape.query * 2 * weights
        return Cost(
            flops=projected + shape.batch * price.flops,
            allowed_flops=projected + shape.batch * price.least,
            parameters=weights + biases + extra.other + self.taps(config) * channels_of(heads),
        )

    def taps(self, config: MechanismConfig) -> int:
        """The taps of the short convolution, 0 for none."""
        own = self.Config.of(config)
        return own.convolution if isinstance(own, ConvolvedConfig) else 0


def channels_of(heads: Heads) -> int:
    """Elements of queries, keys and values of one token."""
    return heads.query * (2 * heads.key_size + heads.value_size)


class Retention(Recurrence):
    """Products of queries and keys fade at a fixed rate, each head at its own; the result is normed and gated.

    The model's rotary positions turn queries and keys where the model has some, else those of the option `base`.
    Outputs are normed a head by their root mean square, as in the authors' code, so its rescaling of the scores, which
    the norm undoes, is left out. With `scale_base` positions are xPos (Sun et al. 2022, arXiv 2212.10554), as the paper
    derives them: a pair of channels that turns slowly keeps more than one that turns fast. Its scales of queries and
    keys, ζ^n and ζ^-m, are the fading ζ^(n - m) of the memory's rows here, so that far positions overflow nothing.
    """

    name = "retnet"
    summary = "retention: scores fade exponentially with the distance, at a fixed rate a head"
    paper = Paper(
        title="Retentive Network: A Successor to Transformer for Large Language Models",
        authors="Sun et al.",
        year=2023,
        arxiv="2307.08621",
    )
    equation = (
        r"S_t = \gamma_h S_{t-1} + k_t v_t^\top,\quad o_t = S_t^\top q_t,\quad \gamma_h = 1 - 2^{-5-h},\quad"
        r" y_t = W_O\left(\mathrm{swish}(W_G x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    capabilities = CAUSAL_ONLY | {Capability.ROTARY}
    update = Update(decay="head")

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrenceConfig):
        """`base` of the rotary angles, None to turn nothing; values are twice as wide as keys, as in the paper.

        `scale_base` tokens let pair p of d turned elements fade by the factor (2p/d + 0.4) / 1.4 of xPos, whose authors
        take 512; None lets nothing fade beside the head.
        """

        base: float | None = 10000.0
        scale_base: float | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.base is not None and not self.base > 1:
                raise InvalidValue.of("base", self.base, "a number above 1, or None")
            if self.scale_base is None:
                return
            if isinstance(self.scale_base, bool) or not 0 < self.scale_base < math.inf:
                raise InvalidValue.of("scale_base", self.scale_base, "a number of tokens above 0, or None")
            if self.base is None and self.rotary is None:
                raise InvalidValue.of("scale_base", self.scale_base, "None where no pairs are turned: give a base")

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `RetentionLayer`; raises as `heads` does, and `InvalidValue` for an odd rotary size."""
        from attn_variants.mechanisms.decay_layers import RetentionLayer

        own = self.Config.of(config)
        return RetentionLayer(
            self.heads(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            chunk=own.chunk,
            rotary=self.rotary_of(config),
            scale_base=own.scale_base,
            first_head=0 if config.heads_of is None else config.heads_of.first,
        )

    def rotary_of(self, config: MechanismConfig) -> Rotary | None:
        """The model's rotary positions, else those of the option."""
        base = self.Config.of(config).base
        return config.rotary or (None if base is None else Rotary(base=base, interleaved=True))

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """A decode step of `RetentionLayer`."""
        apart = self.update_of(config).decay == "channel"
        return retention_step(self.heads(config), self.rotary_of(config), fades_apart=apart)

    def update_of(self, config: MechanismConfig) -> Update:
        """One rate a head, or with xPos one a channel."""
        return self.update if self.Config.of(config).scale_base is None else Update(decay="channel")

    def extras(self, config: MechanismConfig) -> Extra:
        """The gate."""
        heads = self.heads(config)
        return Extra(linear=config.hidden_size * heads.query * heads.value_size)

    def value_size(self, head_dim: int) -> int:
        """Twice the head size."""
        return 2 * head_dim


class GatedLinearAttention(Recurrence):
    """Every channel of the keys fades at a rate that depends on the token, from a gate of low rank.

    Keys are half as wide as values, as in the paper.
    """

    name = "gla"
    summary = "linear attention whose channels fade as each token says"
    paper = Paper(
        title="Gated Linear Attention Transformers with Hardware-Efficient Training",
        authors="Yang et al.",
        year=2023,
        arxiv="2312.06635",
    )
    equation = (
        r"S_t = \mathrm{diag}(\alpha_t) S_{t-1} + k_t v_t^\top,\quad o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad"
        r" \alpha_t = \sigma(W_2 W_1 x_t + b)^{1/\tau},\quad"
        r" y_t = W_O\left(\mathrm{swish}(W_R x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    update = Update(decay="channel")

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrenceConfig):
        """`rank` of the gate that decides what fades; a higher `temperature` τ lets everything fade more slowly."""

        rank: int = 16
        temperature: float = 16.0

        def __post_init__(self) -> None:
            super().__post_init__()
            require_whole("rank", self.rank, ge=1, unit="units")
            require_number("temperature", self.temperature, gt=0)

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `GatedLinearLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.decay_layers import GatedLinearLayer

        own = self.Config.of(config)
        return GatedLinearLayer(
            self.heads(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            chunk=own.chunk,
            rank=own.rank,
            temperature=own.temperature,
        )

    def extras(self, config: MechanismConfig) -> Extra:
        """The low-rank gate of the memory with its bias, the gate of the output and the norm."""
        heads, rank = self.heads(config), self.Config.of(config).rank
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        return Extra(
            linear=rank * (config.hidden_size + into) + config.hidden_size * out, other=into + heads.value_size
        )

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """A decode step of `GatedLinearLayer`."""
        return gated_linear_step(self.heads(config))

    def key_size(self, head_dim: int) -> int:
        """Half the head size."""
        return max(1, head_dim // 2)


class LightningAttention(Recurrence):
    """Linear attention on SiLU features that fades at fixed slopes, those of ALiBi; all heads are normed as one."""

    name = "lightning"
    summary = "linear attention that fades at a fixed slope a head"
    paper = Paper(
        title="Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models",
        authors="Qin et al.",
        year=2024,
        arxiv="2401.04658",
    )
    equation = (
        r"S_t = e^{-m_h} S_{t-1} + k_t v_t^\top,\quad o_t = S_t^\top q_t,\quad m_h = 2^{-8h/H},\quad"
        r" q, k, v = \mathrm{silu}(W x),\quad y_t = W_O\,\mathrm{norm}(o_t)"
    )
    update = Update(decay="head")
    splits_heads = False
    """Its norm is over all heads."""

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `LightningLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.decay_layers import LightningLayer

        own = RecurrenceConfig.of(config)
        return LightningLayer(self.heads(config), hidden_size=config.hidden_size, bias=config.bias, chunk=own.chunk)

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """A decode step of `LightningLayer`."""
        return lightning_step(self.heads(config))

    def extras(self, config: MechanismConfig) -> Extra:
        """The norm."""
        heads = self.heads(config)
        return Extra(other=heads.query * heads.value_size)


class DeltaNet(Recurrence):
    """A key writes only what the memory does not yet say about it, so what it held before is replaced, not added to.

    Queries and keys pass a short convolution and SiLU and have length one; values pass the convolution too. With
    strength 1 a key overwrites; with 0 it writes nothing.
    """

    name = "deltanet"
    summary = "the delta rule: a key replaces what the memory held for it"
    paper = Paper(
        title="Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        authors="Yang et al.",
        year=2024,
        arxiv="2406.06484",
    )
    equation = (
        r"S_t = (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top,\quad o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},"
        r"\quad \beta_t = \sigma(w_\beta^\top x_t),\quad y_t = W_O\,\mathrm{norm}(o_t)"
    )
    update = Update(delta_rule=True)
    Config = ConvolvedConfig

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `DeltaLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.delta_layers import DeltaLayer

        own = ConvolvedConfig.of(config)
        return DeltaLayer(
            self.heads(config), hidden_size=config.hidden_size, bias=config.bias, chunk=own.chunk, taps=own.convolution
        )

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """A decode step of `DeltaLayer`."""
        return delta_step(self.heads(config), self.taps(config))

    def extras(self, config: MechanismConfig) -> Extra:
        """The strengths, one a head, and the norm."""
        return Extra(linear=config.hidden_size * config.num_heads, other=self.heads(config).value_size)


class KimiDeltaAttention(Recurrence):
    """The delta rule on a memory whose channels fade, each as every token says.

    Queries, keys and values pass a short convolution and SiLU; queries and keys have length one. The gates of the
    memory and of the output have the rank of a head's values.
    """

    name = "kda"
    summary = "the delta rule, and every channel of the memory fades as each token says"
    paper = Paper(
        title="Kimi Linear: An Expressive, Efficient Attention Architecture",
        authors="Kimi Team",
        year=2025,
        arxiv="2510.26692",
    )
    equation = (
        r"S_t = (I - \beta_t k_t k_t^\top)\,\mathrm{diag}(\alpha_t) S_{t-1} + \beta_t k_t v_t^\top,\quad"
        r" o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad"
        r" \alpha_t = \exp\left(-e^{a_h}\,\mathrm{softplus}(W_2 W_1 x_t + b)\right),\quad"
        r" y_t = W_O\left(\sigma(W_4 W_3 x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    update = Update(decay="channel", delta_rule=True)
    Config = ConvolvedConfig

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `KimiDeltaLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.delta_layers import KimiDeltaLayer

        own = ConvolvedConfig.of(config)
        return KimiDeltaLayer(
            self.heads(config), hidden_size=config.hidden_size, bias=config.bias, chunk=own.chunk, taps=own.convolution
        )

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """A decode step of `KimiDeltaLayer`."""
        return kimi_delta_step(self.heads(config), self.taps(config))

    def extras(self, config: MechanismConfig) -> Extra:
        """The strengths, the two low-rank gates, the rates and biases of the decay, and the norm."""
        heads = self.heads(config)
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        gates = heads.value_size * (2 * config.hidden_size + into + out)
        return Extra(linear=gates + config.hidden_size * heads.query, other=heads.query + into + heads.value_size)
