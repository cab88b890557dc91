"""Linear recurrences whose state decays: RetNet, GLA and lightning attention; and the base class of all."""

from __future__ import annotations

import dataclasses
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
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrence import Decay, RecurrenceSpec
from attn_core.kernels.recurrent_step import RecurrentStepSpec

from attn_variants.mechanisms.common import BASIC, channels_of, projection_biases, projection_weights
from attn_variants.mechanisms.decode_steps import gated_linear_step, lightning_step, retention_step


class Update(NamedTuple):
    """The update of a state: its `decay`, none, per head or per channel, and whether it uses the delta rule."""

    decay: Decay = "none"
    delta_rule: bool = False


class RecurrencePrice(NamedTuple):
    """FLOPs of a recurrence over one sequence, two per multiply-add: of the plain computation, and the least possible.

    They are counted as by torch: matrix products only, without the triangular systems of the delta rule (chunk² ·
    (key_size + value_size) per chunk) and the write of a single token, which is not a matrix product.
    """

    flops: int
    least: int


def recurrence_price(heads: Heads, update: Update, shape: Shape | Step, chunk: int) -> RecurrencePrice:
    """The FLOPs of whole sequences or of a step: of its tokens by chunks, or of the reads of a single token."""
    if isinstance(shape, Step) and shape.new == 1:
        read = (2 if update.delta_rule else 1) * 2 * heads.query * heads.key_size * heads.value_size
        return RecurrencePrice(read, read)
    flops = chunked_flops(heads, update, shape.query, chunk, memory=isinstance(shape, Step))
    return RecurrencePrice(flops, least_flops(heads, update, shape.query))


def chunked_flops(heads: Heads, update: Update, tokens: int, chunk: int, *, memory: bool) -> int:
    """The FLOPs of `chunked` over one sequence of `tokens`, with or without an initial state (`memory`)."""
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
    """The FLOPs token by token: one product to write, one to read and, by the delta rule, one to look up a key."""
    products = 3 if update.delta_rule else 2
    return tokens * products * 2 * heads.query * heads.key_size * heads.value_size


def _pair_flops(update: Update, key: int, chunk: int) -> int:
    if update.decay != "channel":
        return 2 * chunk * chunk * key
    # Every pair of different tokens of a block is computed once, in one of the rounds of halving.
    block = 1 << (chunk - 1).bit_length()
    return block * (block - 1) * key


CAUSAL_ONLY = BASIC | frozenset(
    {Capability.CAUSAL, Capability.INCREMENTAL, Capability.EXACT, Capability.PADDING, Capability.WEIGHTS}
)
"""The capabilities of recurrences that are causal by definition."""


class Extra(NamedTuple):
    """Parameters besides query, key, value, output and convolution: those of linear layers, and all others."""

    linear: int = 0
    other: int = 0


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig(MechanismConfig):
    """The sizes of a head's state, and the chunk size.

    `key_size` and `value_size` default to the mechanism's fraction or multiple of the head size. `chunk` is the number
    of tokens that attend to each other pair by pair, and to earlier tokens through the state; it affects only the
    speed.
    """

    key_size: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)
    value_size: int | None = checked(None, require_whole, ge=1, unit="elements", optional=True)
    chunk: int = checked(64, require_whole, ge=1, unit="tokens")


@dataclass(frozen=True, kw_only=True)
class ConvolvedConfig(RecurrenceConfig):
    """`convolution` is the number of taps of the short convolution over queries, keys and values; 0 for none."""

    convolution: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convolution:
            require_whole("convolution", self.convolution, ge=1, unit="taps")


class Recurrence(ComputedMechanism):
    """Base class of linear recurrences with one state per head; the layer is a `RecurrenceLayer`."""

    Config = RecurrenceConfig
    capabilities = CAUSAL_ONLY
    update: ClassVar[Update]
    splits_heads = True

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """The sizes of query, key and value in the weight of the convolution, which covers all three."""
        heads = self.heads(config)
        into, out = heads.key_value * heads.key_size, heads.query * heads.value_size
        return {"convolution.weight": (into, into, out)}

    @abstractmethod
    def extras(self, config: MechanismConfig) -> Extra:
        """The numbers of further parameters of this mechanism."""

    def key_size(self, head_dim: int) -> int:
        """The default key size of a head."""
        return head_dim

    def value_size(self, head_dim: int) -> int:
        """The default value size of a head."""
        return head_dim

    def update_of(self, config: MechanismConfig) -> Update:  # noqa: ARG002 -- most have but one
        """The update of the state with these options."""
        return self.update

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config: `query` states and values, and `key_value` queries and keys, of which each serves as
        many consecutive states."""
        size = config.head_layout.key_size
        own = RecurrenceConfig.of(config)
        return Heads(
            query=config.num_heads,
            key_value=getattr(own, "key_heads", None) or config.num_heads,
            key_size=own.key_size or self.key_size(size),
            value_size=own.value_size or self.value_size(size),
        )

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The recurrence that kernels compute."""
        update, heads = self.update_of(config), self.heads(config)
        heads = dataclasses.replace(heads, key_value=heads.query)
        return RecurrenceSpec(heads=heads, decay=update.decay, delta_rule=update.delta_rule)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """One state S per head, in float32 for all model dtypes, and the last inputs of a convolution."""
        heads, taps = self.heads(config), self.taps(config)
        memory = {"S": Field((heads.query, heads.key_size, heads.value_size), dtype="float32")}
        if taps:
            memory["tail"] = Field((taps - 1, channels_of(heads)))
        return {"memory": Slot(memory)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections and of the recurrence by chunks; earlier tokens cost nothing in a step.

        Short convolutions are not counted, as they are not matrix products. The least cost is that of every token
        reading and writing the state once.
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
        """The number of taps of the short convolution, 0 for none."""
        own = self.Config.of(config)
        return own.convolution if isinstance(own, ConvolvedConfig) else 0


class Retention(Recurrence):
    """Retention: query-key products decay with the distance, at a fixed rate per head; outputs are normed and gated.

    Queries and keys are rotated by the model's rotary embedding if it has one, else by one with the option `base`.
    Outputs are RMS-normalised per head, as in the authors' code; its rescaling of the scores, which the norm cancels,
    is left out. With `scale_base` positions are xPos (Sun et al. 2022, arXiv 2212.10554), as the paper derives them:
    slowly rotating pairs of channels decay less than fast ones. The scales of queries and keys, ζ^n and ζ^-m, are
    applied as a decay ζ^(n - m) of the rows of the state, so that large positions do not overflow.
    """

    name = "retnet"
    summary = "retention: scores decay exponentially with the distance, at a fixed rate per head"
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
        """`base` is that of the rotary angles, None for no rotary embedding; values are twice as wide as keys by
        default, as in the paper.

        Over `scale_base` tokens, the pair p of d rotated elements decays by the factor (2p/d + 0.4) / 1.4 of xPos,
        whose authors use 512; with None, only the decay of the head applies. `norm_eps` is that of the norm of outputs.
        """

        base: float | None = 10000.0
        scale_base: float | None = None
        norm_eps: float = checked(1e-6, require_number, gt=0)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.base is not None and not self.base > 1:
                raise InvalidValue.of("base", self.base, "a number above 1, or None")
            if self.scale_base is None:
                return
            if isinstance(self.scale_base, bool) or not 0 < self.scale_base < math.inf:
                raise InvalidValue.of("scale_base", self.scale_base, "a finite number of tokens above 0, or None")
            if self.base is None and self.rotary is None:
                raise InvalidValue.of(
                    "scale_base", self.scale_base, "None without rotary positions; give a base to use it"
                )

    def build(self, config: MechanismConfig) -> Any:
        """A new `RetentionLayer`; raises the errors of `heads`, and `InvalidValue` for an odd rotary size."""
        from attn_variants.mechanisms.decay_layers import RetentionLayer, RetentionPositions

        own = self.Config.of(config)
        return RetentionLayer(
            self.heads(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            chunk=own.chunk,
            positions=RetentionPositions(
                self.rotary_of(config), own.scale_base, 0 if config.heads_of is None else config.heads_of.first
            ),
            eps=own.norm_eps,
        )

    def rotary_of(self, config: MechanismConfig) -> Rotary | None:
        """The model's rotary embedding, else one with the option `base`; None if there is neither."""
        base = self.Config.of(config).base
        return config.rotary or (None if base is None else Rotary(base=base, interleaved=True))

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step of `RetentionLayer`."""
        apart = self.update_of(config).decay == "channel"
        return retention_step(self.heads(config), self.rotary_of(config), fades_apart=apart)

    def update_of(self, config: MechanismConfig) -> Update:
        """A decay per head or, with xPos, per channel."""
        return self.update if self.Config.of(config).scale_base is None else Update(decay="channel")

    def extras(self, config: MechanismConfig) -> Extra:
        """The parameters of the gate."""
        heads = self.heads(config)
        return Extra(linear=config.hidden_size * heads.query * heads.value_size)

    def value_size(self, head_dim: int) -> int:
        """Twice the head size."""
        return 2 * head_dim


class GatedLinearAttention(Recurrence):
    """Linear attention whose state decays per key channel, at a rate that a low-rank gate computes from each token.

    Keys are half as wide as values by default, as in the paper.
    """

    name = "gla"
    summary = "linear attention with a data-dependent decay for each key channel"
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
        """`rank` is that of the decay gate; a higher `temperature` τ makes the decay slower."""

        rank: int = checked(16, require_whole, ge=1, unit="units")
        temperature: float = checked(16.0, require_number, gt=0)

    def build(self, config: MechanismConfig) -> Any:
        """A new `GatedLinearLayer`; raises the errors of `heads`."""
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
        """The parameters of the low-rank decay gate with its bias, of the output gate and of the norm."""
        heads, rank = self.heads(config), self.Config.of(config).rank
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        return Extra(
            linear=rank * (config.hidden_size + into) + config.hidden_size * out, other=into + heads.value_size
        )

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step of `GatedLinearLayer`."""
        return gated_linear_step(self.heads(config))

    def key_size(self, head_dim: int) -> int:
        """Half the head size."""
        return max(1, head_dim // 2)


class LightningAttention(Recurrence):
    """Linear attention on SiLU features, with a fixed decay per head by ALiBi's slopes, a norm over all heads, and a
    gate: the layer of MiniMax-01 (MiniMax 2025, arXiv 2501.08313)."""

    name = "lightning"
    summary = "linear attention with a fixed decay per head and a gate"
    used_by = ("MiniMax-01",)
    paper = Paper(
        title="Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths in Large Language Models",
        authors="Qin et al.",
        year=2024,
        arxiv="2401.04658",
    )
    equation = (
        r"S_t = e^{-m_h} S_{t-1} + k_t v_t^\top,\quad o_t = S_t^\top q_t,\quad m_h = f\,2^{-8h/H},\quad"
        r" q, k, v = \mathrm{silu}(W x),\quad y_t = W_O\left(\sigma(W_G x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    update = Update(decay="head")
    splits_heads = False
    """Not split by heads, as the norm is over all heads."""

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrenceConfig):
        """`slope_factor` f multiplies the slopes: MiniMax-01 has 1 - l / (L - 1 + 1e-5) + 1e-5 in layer l of L, so that
        deeper layers forget more slowly."""

        slope_factor: float = checked(1.0, require_number, gt=0)

    def build(self, config: MechanismConfig) -> Any:
        """A new `LightningLayer`; raises the errors of `heads`."""
        from attn_variants.mechanisms.decay_layers import LightningLayer

        own = self.Config.of(config)
        return LightningLayer(
            self.heads(config),
            hidden_size=config.hidden_size,
            bias=config.bias,
            chunk=own.chunk,
            slope_factor=own.slope_factor,
        )

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step of `LightningLayer`."""
        return lightning_step(self.heads(config))

    def extras(self, config: MechanismConfig) -> Extra:
        """The parameters of the gate and of the norm."""
        heads = self.heads(config)
        out = heads.query * heads.value_size
        return Extra(linear=config.hidden_size * out, other=out)
