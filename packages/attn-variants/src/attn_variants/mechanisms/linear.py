"""Attention by products of feature maps instead of a softmax: linear attention, Performer, efficient attention."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    Heads,
    MechanismConfig,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
)
from attn_core.checks import checked, require_choice, require_whole
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrence import RecurrenceSpec
from attn_core.kernels.recurrent_step import RecurrentStepSpec

from attn_variants.mechanisms.common import BASIC, projection_biases, projection_weights
from attn_variants.mechanisms.decode_steps import linear_step
from attn_variants.mechanisms.recurrences import (
    Extra,
    Recurrence,
    RecurrenceConfig,
    Update,
    chunked_flops,
    least_flops,
    recurrence_price,
)


class LinearAttention(ComputedMechanism):
    """Products of positive features instead of exponentials, so that the state is one matrix per head."""

    name = "linear"
    splits_heads = True
    summary = "feature maps in place of the softmax: time linear in the length, a state of constant size"
    paper = Paper(
        title="Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        authors="Katharopoulos et al.",
        year=2020,
        arxiv="2006.16236",
    )
    equation = (
        r"o_i = \frac{\phi(q_i)^\top S_i}{\phi(q_i)^\top z_i + \epsilon},\quad"
        r" S_i = \sum_{j \le i} \phi(k_j) v_j^\top,\quad z_i = \sum_{j \le i} \phi(k_j),\quad"
        r" \phi(x) = \mathrm{elu}(x) + 1"
    )
    capabilities = BASIC | frozenset(
        {
            Capability.CAUSAL,
            Capability.BIDIRECTIONAL,
            Capability.INCREMENTAL,
            Capability.EXACT,
            Capability.PADDING,
            Capability.WEIGHTS,
        }
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`chunk` is the number of tokens that attend to each other pair by pair, and to earlier tokens through the
        sums; it affects only the speed."""

        chunk: int = checked(64, require_whole, ge=1, unit="tokens")

    def build(self, config: MechanismConfig) -> Any:
        """A new `LinearAttentionLayer`; raises the errors of `heads`."""
        from attn_variants.mechanisms.linear_layers import LinearAttentionLayer

        return LinearAttentionLayer(
            self.heads(config),
            hidden_size=config.hidden_size,
            causal=config.causal,
            bias=config.bias,
            chunk=chunk_of(config),
        )

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The sums S of every head, with z as their last column, in float32 for all model dtypes."""
        heads = self.summed(config)
        return {"memory": Slot({"S": Field((heads.query, heads.key_size, heads.value_size), dtype="float32")})}

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The recurrence that kernels compute; None if not causal."""
        return RecurrenceSpec(heads=self.summed(config)) if config.causal else None

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step of `LinearAttentionLayer`; None if not causal."""
        return linear_step(self.heads(config)) if config.causal else None

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, pairs within a chunk and the sums; earlier keys cost nothing in a step."""
        heads = self.heads(config)
        weights = projection_weights(config, heads)
        summed = self.summed(config)
        sums, least = recurrence_price(summed, Update(), shape, chunk_of(config))
        projected = shape.query * 2 * weights
        return Cost(
            flops=shape.batch * (projected + (sums if config.causal else least)),
            allowed_flops=shape.batch * (projected + least),
            parameters=weights + projection_biases(config, heads),
        )

    def summed(self, config: MechanismConfig) -> Heads:
        """The head sizes of the sums: z is one more column of S."""
        heads = self.heads(config)
        return dataclasses.replace(heads, value_size=heads.value_size + 1)

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config; there is no rotary embedding, as rotated features would not be positive."""
        return config.head_layout


def chunk_of(config: MechanismConfig) -> int:
    """The number of tokens of one chunk."""
    return LinearAttention.Config.of(config).chunk


EPSILONS = {"softmax": 1e-6, "relu": 1e-3}
"""The ε added to every feature, as in the authors' code."""


class Performer(Recurrence):
    """FAVOR+: softmax attention approximated by positive random features, so that the state is one matrix per head.

    The random directions are orthogonal; they are drawn once, or again after every `redraw` updates. Exponentials are
    kept finite by the largest feature of the tokens so far, so that decoding equals the full computation; it affects
    only ε, which is relative to it.
    """

    name = "performer"
    summary = "FAVOR+: random features approximate softmax; time linear in the length, a state of constant size"
    paper = Paper(
        title="Rethinking Attention with Performers", authors="Choromanski et al.", year=2020, arxiv="2009.14794"
    )
    equation = (
        r"o_i = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}{\phi(q_i)^\top \sum_j \phi(k_j)},\quad"
        r" \phi(x)_r = e^{\omega_r^\top x - \|x\|^2 / 2},\quad \omega_r \sim \mathcal{N}(0, I),\quad"
        r" \mathbb{E}[\phi(q)^\top \phi(k)] \propto e^{q^\top k}"
    )
    capabilities = BASIC | frozenset(
        {
            Capability.CAUSAL,
            Capability.BIDIRECTIONAL,
            Capability.INCREMENTAL,
            Capability.PADDING,
            Capability.WEIGHTS,
            Capability.NORMALISED,
        }
    )

    @dataclass(frozen=True, kw_only=True)
    class Config(RecurrenceConfig):
        """`features` m is the number of random features per head, by default d ln d; `kernel` is "softmax" or "relu";
        `epsilon` is added to each feature. In training new directions are drawn every `redraw` updates, as in the
        paper, 0 for never."""

        features: int | None = checked(None, require_whole, ge=1, unit="features", optional=True)
        kernel: str = checked("softmax", require_choice, EPSILONS)
        epsilon: float | None = None
        redraw: int = checked(0, require_whole, ge=0, unit="updates")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.epsilon is not None and not self.epsilon > 0:
                raise InvalidValue.of("epsilon", self.epsilon, "a number above 0")

    def build(self, config: MechanismConfig) -> Any:
        """A new `SoftmaxFeatureLayer` or `ReluFeatureLayer`; raises the errors of `heads`."""
        from attn_variants.mechanisms.linear_layers import ReluFeatureLayer, SoftmaxFeatureLayer

        own, heads = self.Config.of(config), self.heads(config)
        layer = {"softmax": SoftmaxFeatureLayer, "relu": ReluFeatureLayer}[own.kernel]
        return layer(
            heads,
            hidden_size=config.hidden_size,
            causal=config.causal,
            bias=config.bias,
            chunk=own.chunk,
            features=features_of(own, heads),
            epsilon=own.epsilon or EPSILONS[own.kernel],
            redraw=own.redraw,
        )

    def extras(self, config: MechanismConfig) -> Extra:  # noqa: ARG002 -- the contract of recurrences
        """No further parameters, as the directions are not learned."""
        return Extra()

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The sums over the features, in float32; for "softmax" also the sum of values and the largest log feature."""
        wider = self.wider(config)
        memory = {"S": Field((wider.query, wider.key_size, wider.value_size), dtype="float32")}
        if self.Config.of(config).kernel == "softmax":
            memory["seen"] = Field((wider.query, wider.value_size), dtype="float32")
            memory["top"] = Field((wider.query,), dtype="float32")
        return {"memory": Slot(memory)}

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The sums over the features; None if not causal. For "softmax" they decay as the largest feature grows."""
        if not config.causal:
            return None
        fades = self.Config.of(config).kernel == "softmax"
        return RecurrenceSpec(heads=self.wider(config), decay="head" if fades else "none")

    def wider(self, config: MechanismConfig) -> Heads:
        """The head sizes of the sums: features in place of keys, and values with a column of ones."""
        heads = self.heads(config)
        features = features_of(self.Config.of(config), heads)
        return dataclasses.replace(heads, key_size=features, value_size=heads.value_size + 1)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, features, pairs within a chunk and sums; earlier keys cost nothing in a step."""
        own, heads = self.Config.of(config), self.heads(config)
        features = features_of(own, heads)
        into = heads.query * heads.key_size
        weights = projection_weights(config, heads)
        wider = self.wider(config)
        if own.kernel == "relu":
            chunks, least = recurrence_price(wider, Update(), shape, own.chunk)
        else:
            least = least_flops(wider, Update(), shape.query)
            # A single token is a chunk of its own, as its largest log feature may exceed that of the state.
            decoding = isinstance(shape, Step) and shape.new == 1
            chunks = chunked_flops(wider, Update(), shape.query, 1 if decoding else own.chunk, memory=False)
        sums = chunks if config.causal else least
        made = shape.query * 2 * (weights + 2 * into * features)
        return Cost(
            flops=shape.batch * (made + sums),
            allowed_flops=shape.batch * (made + least),
            parameters=weights + projection_biases(config, heads),
        )


def features_of(config: Performer.Config, heads: Heads) -> int:
    """The number of features of one head: the option, or d ln d (Choromanski et al. 2021, theorem 4)."""
    return config.features or max(1, int(heads.key_size * math.log(heads.key_size)))


class EfficientAttention(ComputedMechanism):
    """Softmax of queries over channels and of keys over tokens, so that keys and values are multiplied first.

    The second softmax is over the whole sequence, so there is no causal form and no incremental decoding.
    """

    name = "efficient"
    splits_heads = True
    summary = "separate softmaxes of queries and keys, so that keys and values are multiplied first, in linear time"
    paper = Paper(
        title="Efficient Attention: Attention with Linear Complexities",
        authors="Shen et al.",
        year=2018,
        arxiv="1812.01243",
    )
    equation = (
        r"O = \rho_q(Q) \left(\rho_k(K)^\top V\right),\quad \rho_q \text{ over channels},\ \rho_k \text{ over tokens}"
    )
    capabilities = BASIC | frozenset(
        {
            Capability.BIDIRECTIONAL,
            Capability.EXACT,
            Capability.PADDING,
            Capability.WEIGHTS,
            Capability.NORMALISED,
        }
    )

    def build(self, config: MechanismConfig) -> Any:
        """A new `EfficientLayer` with randomly initialised weights."""
        from attn_variants.mechanisms.linear_layers import EfficientLayer

        return EfficientLayer(self.heads(config), hidden_size=config.hidden_size, bias=config.bias)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, of keys times values, and of queries times the result."""
        heads = self.heads(config)
        weights = projection_weights(config, heads)
        products = 2 * heads.query * heads.key_size * heads.value_size
        flops = shape.batch * shape.query * 2 * (weights + products)
        return Cost(flops=flops, allowed_flops=flops, parameters=weights + projection_biases(config, heads))

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config."""
        return config.head_layout
