"""Linear attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from attn_core import Capability, ComputedMechanism, Cost, Field, Heads, MechanismConfig, Paper, Shape, Slot, StateSpecs
from attn_core.kernels.recurrence import RecurrenceSpec

from attn_variants.mechanisms.computed import multi_heads, projection_biases, projection_weights
from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.recurrences.recurrence import Update, chunked_flops, least_flops


class LinearAttention(ComputedMechanism):
    """Products of positive features in place of exponentials, so that a sequence is remembered as one matrix a head."""

    name = "linear"
    summary = "features in place of the softmax: time linear, memory constant in the length"
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
    capabilities = frozenset(
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
        """`chunk` tokens meet pair by pair, and all earlier ones through the sums; it changes speed only."""

        chunk: int = 64

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("chunk", self.chunk, "tokens")

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `LinearAttentionLayer`; raises `InvalidValue` or `Incompatible` as `heads` does."""
        from attn_variants.mechanisms.recurrences.linear_layers import LinearAttentionLayer

        return LinearAttentionLayer(
            self.heads(config), width=config.width, causal=config.causal, bias=config.bias, chunk=chunk_of(config)
        )

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The sums S of every head, with z as their last column, in float32, whatever the model's type."""
        heads = self.summed(config)
        return {"memory": Slot({"S": Field((heads.query, heads.key_size, heads.value_size), dtype="float32")})}

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The sums that kernels are asked for, but where the order is ignored."""
        return RecurrenceSpec(heads=self.summed(config)) if config.causal else None

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Projections, pairs within a chunk and the sums; keys before the queries cost nothing any more."""
        heads = self.heads(config)
        weights = projection_weights(config, heads)
        summed = self.summed(config)
        least = least_flops(summed, Update(), shape.query)
        sums = chunked_flops(summed, Update(), shape.query, chunk_of(config)) if config.causal else least
        projected = shape.query * 2 * weights
        return Cost(
            flops=shape.batch * (projected + sums),
            allowed_flops=shape.batch * (projected + least),
            parameters=weights + projection_biases(config, heads),
        )

    def summed(self, config: MechanismConfig) -> Heads:
        """The heads of the sums: z is carried as one more column of S."""
        heads = self.heads(config)
        return dataclasses.replace(heads, value_size=heads.value_size + 1)

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config; raises as `multi_heads` does. Rotated features would not be positive."""
        return multi_heads(config, self.name)


def chunk_of(config: MechanismConfig) -> int:
    """The tokens of one chunk."""
    return LinearAttention.Config.of(config).chunk
