"""Performer attention."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from attn_core import Capability, Cost, Field, Heads, MechanismConfig, Paper, Shape, Slot, StateSpecs
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrence import RecurrenceSpec

from attn_variants.mechanisms.computed import projection_biases, projection_weights
from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.recurrences.recurrence import (
    Extra,
    Recurrence,
    RecurrenceConfig,
    Update,
    chunked_flops,
    least_flops,
)

EPSILONS = {"softmax": 1e-6, "relu": 1e-3}
"""What is added to every feature, as in the authors' code."""


class Performer(Recurrence):
    """Softmax attention estimated by positive random features, so that a sequence is remembered as one matrix a head.

    Directions are orthogonal and drawn once; a layer in training can `redraw()` them. The largest feature, which keeps
    the exponentials finite, is that of the tokens so far, so that decoding equals the full computation; it changes
    ε only, which is relative to it.
    """

    name = "performer"
    summary = "FAVOR+: softmax by random features; time linear, memory constant in the length"
    paper = Paper(
        title="Rethinking Attention with Performers", authors="Choromanski et al.", year=2020, arxiv="2009.14794"
    )
    equation = (
        r"o_i = \frac{\phi(q_i)^\top \sum_j \phi(k_j) v_j^\top}{\phi(q_i)^\top \sum_j \phi(k_j)},\quad"
        r" \phi(x)_r = e^{\omega_r^\top x - \|x\|^2 / 2},\quad \omega_r \sim \mathcal{N}(0, I),\quad"
        r" \mathbb{E}[\phi(q)^\top \phi(k)] \propto e^{q^\top k}"
    )
    capabilities = frozenset(
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
        """`features` m of a head, by default d ln d; `kernel` is "softmax" or "relu"; `epsilon` is added to each."""

        features: int | None = None
        kernel: str = "softmax"
        epsilon: float | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.features is not None:
                check_whole("features", self.features, "features")
            if self.kernel not in EPSILONS:
                raise InvalidValue.of("kernel", self.kernel, " or ".join(map(repr, EPSILONS)))
            if self.epsilon is not None and not self.epsilon > 0:
                raise InvalidValue.of("epsilon", self.epsilon, "a number above 0")

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `SoftmaxFeatureLayer` or `ReluFeatureLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.recurrences.performer_layer import ReluFeatureLayer, SoftmaxFeatureLayer

        own, heads = self.Config.of(config), self.heads(config)
        layer = {"softmax": SoftmaxFeatureLayer, "relu": ReluFeatureLayer}[own.kernel]
        return layer(
            heads,
            width=config.width,
            causal=config.causal,
            bias=config.bias,
            chunk=own.chunk,
            features=features_of(own, heads),
            epsilon=own.epsilon or EPSILONS[own.kernel],
        )

    def extras(self, config: MechanismConfig) -> Extra:  # noqa: ARG002 -- the contract of recurrences
        """None: the directions are not learned."""
        return Extra()

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Sums over the features, in float32; for the softmax also the sum of values and the largest log feature."""
        wider = self.wider(config)
        memory = {"S": Field((wider.query, wider.key_size, wider.value_size), dtype="float32")}
        if self.Config.of(config).kernel == "softmax":
            memory["seen"] = Field((wider.query, wider.value_size), dtype="float32")
            memory["top"] = Field((wider.query,), dtype="float32")
        return {"memory": Slot(memory)}

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """Sums over the features, but where the order is ignored; for the softmax they fade as its maximum grows."""
        if not config.causal:
            return None
        fades = self.Config.of(config).kernel == "softmax"
        return RecurrenceSpec(heads=self.wider(config), decay="head" if fades else "none")

    def wider(self, config: MechanismConfig) -> Heads:
        """The heads of the sums: features in place of keys, and values with a column of ones."""
        heads = self.heads(config)
        features = features_of(self.Config.of(config), heads)
        return dataclasses.replace(heads, key_size=features, value_size=heads.value_size + 1)

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Projections, features, pairs within a chunk and sums; keys before the queries cost nothing any more."""
        own, heads = self.Config.of(config), self.heads(config)
        features = features_of(own, heads)
        into = heads.query * heads.key_size
        weights = projection_weights(config, heads)
        wider = self.wider(config)
        least = least_flops(wider, Update(), shape.query)
        sums = chunked_flops(wider, Update(), shape.query, own.chunk) if config.causal else least
        made = shape.query * 2 * (weights + 2 * into * features)
        return Cost(
            flops=shape.batch * (made + sums),
            allowed_flops=shape.batch * (made + least),
            parameters=weights + projection_biases(config, heads),
        )


def features_of(config: Performer.Config, heads: Heads) -> int:
    """The features of one head: the option, or d ln d (Choromanski et al. 2021, theorem 4)."""
    return config.features or max(1, int(heads.key_size * math.log(heads.key_size)))
