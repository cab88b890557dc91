"""Selective attention: each token says which earlier ones later tokens need no longer see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import (
    Capability,
    Causal,
    ComputedMechanism,
    Cost,
    Field,
    InvalidValue,
    Mechanism,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
    hookimpl,
)

if TYPE_CHECKING:
    from attn_gated.selective.layer import SelectiveLayer

LONGEST = 4096
"""The longest sequence that is decoded, in tokens, if the config has no `max_seq_len`."""


class Selective(ComputedMechanism):
    """The positive scores of the first head add up along the sequence, and are subtracted from those of every head for
    the tokens after it.

    No token masks itself, and none the first. `max_seq_len`, 4096 by default, is the number of sums that a layer keeps
    for a sequence that it decodes.
    """

    name = "selective"
    summary = "what earlier queries of the first head attended to is subtracted from the scores of all heads"
    paper = Paper(
        title="Selective Attention Improves Transformer",
        authors="Leviathan et al.",
        year=2024,
        arxiv="2410.02703",
    )
    equation = (
        r"O^h = \mathrm{softmax}\left(S^h - F + M\right) V^h,\quad S^h = \frac{Q^h {K^h}^\top}{\sqrt{d_k}},\quad"
        r" F_{ij} = \sum_{j < l < i} \max(S^1_{lj}, 0) \text{ for } j > 1,\quad F_{i1} = 0"
    )
    capabilities = frozenset(Capability) - {
        Capability.CROSS,
        Capability.BIDIRECTIONAL,
        Capability.SHARES_KV,
        Capability.CHOOSES,
    }

    def build(self, config: MechanismConfig) -> SelectiveLayer:
        """A new `SelectiveLayer`; raises `InvalidValue` unless rotary positions turn an even number of elements."""
        from attn_gated.selective.layer import SelectiveLayer

        size, rotary = config.head_layout.key_size, config.rotary
        if rotary is not None and (int(size * rotary.fraction) < 2 or int(size * rotary.fraction) % 2):
            given = f"{rotary.fraction} of head_size {size}"
            raise InvalidValue.of("rotary.fraction", given, "a fraction that gives an even number of elements")
        return SelectiveLayer(config, longest(config))

    def state(self, config: MechanismConfig) -> StateSpecs:
        """Keys and values, and the sum that each token of the longest sequence is masked by. Every step changes the
        sums of all earlier tokens, so that they are no rows of the cache; in float32, because thousands are added."""
        heads = config.head_layout
        key, value = Field((heads.key_value, heads.key_size)), Field((heads.key_value, heads.value_size))
        sums = Field((longest(config),), dtype="float32")
        return {"kv": Paged({"key": key, "value": value}), "masked": Slot({"sum": sums})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of softmax attention, whose scores of the first head are used twice."""
        heads, width = config.head_layout, config.hidden_size
        projected = width * (heads.query + heads.key_value) * (heads.key_size + heads.value_size)
        biases = (heads.query + heads.key_value) * heads.key_size + heads.key_value * heads.value_size + width
        tokens, pair = 2 * shape.batch * shape.query * projected, 2 * heads.query * (heads.key_size + heads.value_size)
        return Cost(
            flops=tokens + shape.batch * shape.query * shape.key * pair,
            allowed_flops=tokens + shape.batch * Causal().count(shape.query, shape.key) * pair,
            parameters=projected + config.bias * biases,
        )


def longest(config: MechanismConfig) -> int:
    """The length of the longest sequence that is decoded, in tokens."""
    return config.max_seq_len or LONGEST


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Selective()]
