"""Coverage: attention to a source that remembers how much of it was attended to before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import (
    Capability,
    ComputedMechanism,
    Cost,
    Field,
    MechanismConfig,
    Paper,
    Shape,
    Slot,
    Source,
    StateSpecs,
    Step,
)

from attn_variants.mechanisms.common import BASIC

if TYPE_CHECKING:
    from attn_variants.mechanisms.coverage_layer import CoverageLayer

LONGEST = 512
"""Tokens of the longest source where the config says no `max_seq_len`."""


class CoverageAttention(ComputedMechanism):
    """Additive attention to a source whose scores see the sum of all earlier weights on each token of the source.

    Each head has a sum of its own. `max_seq_len` is the longest source, 512 where the config says none: so many sums a
    request keeps. The paper's coverage loss is not added.
    """

    name = "coverage"
    splits_heads = True
    summary = "additive attention to a source that remembers what it attended to"
    paper = Paper(
        title="Get To The Point: Summarization with Pointer-Generator Networks",
        authors="See et al.",
        year=2017,
        arxiv="1704.04368",
    )
    equation = (
        r"c_i = \textstyle\sum_{i' < i} \alpha_{i'},\quad e_{ij} = v^\top \tanh(W_Q x_i + W_K s_j + w_c c_{ij}),\quad"
        r" \alpha_i = \mathrm{softmax}(e_i),\quad o_i = W_O \textstyle\sum_j \alpha_{ij} W_V s_j"
    )
    capabilities = BASIC | frozenset(
        {
            Capability.CROSS,
            Capability.INCREMENTAL,
            Capability.EXACT,
            Capability.WEIGHTS,
            Capability.NORMALISED,
            Capability.PADDING,
        }
    )
    sequential = True

    def build(self, config: MechanismConfig) -> CoverageLayer:
        """A fresh layer with random weights."""
        from attn_variants.mechanisms.coverage_layer import CoverageLayer

        return CoverageLayer(
            config.head_layout, hidden_size=config.hidden_size, bias=config.bias, longest=longest(config)
        )

    def state(self, config: MechanismConfig) -> StateSpecs:
        """A key and a value of every source token, and the coverage of the longest source."""
        heads = config.head_layout
        row = Field((heads.query, heads.key_size))
        coverage = Field((heads.query, longest(config)))
        return {"source": Source({"key": row, "value": row}), "coverage": Slot({"sum": coverage})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Projections, a score and a weighted value per pair."""
        inner = config.head_layout.query * config.head_layout.key_size
        linear = 2 * config.hidden_size * inner
        pairs = shape.batch * shape.query * shape.source
        flops = 2 * shape.batch * (shape.query + shape.encoded) * linear + 4 * pairs * inner
        biases = 2 * inner + config.hidden_size if config.bias else 0
        return Cost(flops=flops, allowed_flops=flops, parameters=2 * linear + 2 * inner + biases)


def longest(config: MechanismConfig) -> int:
    """Tokens of the longest source."""
    return config.max_seq_len or LONGEST
