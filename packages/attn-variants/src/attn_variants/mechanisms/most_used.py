"""Compressive memory that keeps the tokens with the most attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    MechanismConfig,
    Paged,
    Shape,
    Slot,
    StateSpecs,
    Step,
)

from attn_variants.mechanisms.compressive import CompressiveMemory, SegmentedConfig, least_pairs, memory_sizes


@dataclass(frozen=True, kw_only=True)
class MostUsedConfig(SegmentedConfig):
    """Sizes in tokens: a `segment`, a `memory` before it, and before that `compressed` tokens, one of every `rate`.

    `rate` must divide `segment` and `memory`.
    """


class MostUsedMemory(ComputedMechanism):
    """Causal attention within a segment, over a memory of the tokens before it, and over the most used before that.

    Of the tokens that leave the memory, one of every `rate` is kept: those with the largest average attention weight,
    the function "most used" of the paper's section 3.1. Positions are left to the model.
    """

    name = "most_used"
    counts_from_start = True  # segments are counted from the first row
    summary = "a memory of recent tokens, and of the older tokens with the largest attention weights"
    paper = CompressiveMemory.paper
    equation = (
        r"o_i = \mathrm{softmax}\left(\frac{q_i K_{S_i}^\top}{\sqrt{d_k}}\right) V_{S_i},\quad"
        r" S_i = U \cup \{i - i \bmod s - m, \ldots, i\},\quad"
        r" U \leftarrow U \cup \mathrm{top}_{s / c} \left\{\bar\alpha_j : j \text{ leaves the memory}\right\}"
    )
    sketch: ClassVar = CompressiveMemory.sketch
    capabilities = CompressiveMemory.capabilities | {Capability.CHOOSES}
    sequential = True
    Config = MostUsedConfig

    def build(self, config: MechanismConfig) -> Any:
        """A new `MostUsedLayer`; raises `InvalidValue` unless the key/value heads divide the heads."""
        from attn_variants.mechanisms.most_used_layer import MostUsedLayer

        return MostUsedLayer(
            config.head_layout, hidden_size=config.hidden_size, bias=config.bias, past=memory_sizes(config)
        )

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values of a memory and a segment, the usage of each token, and keys and values of kept tokens."""
        past, heads = memory_sizes(config), (config.num_heads, config.head_layout.key_size)
        row, kept = Field(heads), Field((past.compressed, *heads))
        far = {"key": kept, "value": kept, "usage": Field((past.window,), "float32")}
        return {"kv": Paged({"key": row, "value": row}, window=past.window), "compressed": Slot(far)}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and pairs; segments score all of their memory, steps everything that is stored."""
        own, inner = MostUsedConfig.of(config), config.num_heads * config.head_layout.key_size
        linear, past = 4 * config.hidden_size * inner, memory_sizes(config)
        biases = 3 * inner + config.hidden_size if config.bias else 0
        pairs, place, end = 0, shape.remembered, shape.remembered + shape.query
        while place < end:
            start = place // past.segment * past.segment
            stop = min(start + past.segment, end)
            first = max(0, start - past.memory)
            near = stop - first
            if isinstance(shape, Step):
                near = min(shape.remembered, past.window - 1) + shape.query
            pairs += (stop - place) * (min(past.compressed, first // past.rate) + near)
            place = stop
        tokens, pair = 2 * shape.batch * shape.query * linear, 4 * inner
        return Cost(
            flops=tokens + shape.batch * pairs * pair,
            allowed_flops=tokens + shape.batch * least_pairs(own, shape) * pair,
            parameters=linear + biases,
        )
