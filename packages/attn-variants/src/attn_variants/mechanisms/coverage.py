"""Coverage: attention to a source that tracks how much each source token has been attended to before."""

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
"""The longest source, in tokens, if the config has no `max_seq_len`."""


class CoverageAttention(ComputedMechanism):
    """Additive attention to a source whose scores include the sum of all earlier weights on each source token.

    Each head has its own sums. `max_seq_len`, 512 by default, is the length of the longest source, and so the number of
    sums stored per request and head. The paper's coverage loss is not added.
    """

    name = "coverage"
    splits_heads = True
    summary = "additive cross-attention whose scores depend on the sum of all earlier weights (coverage)"
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
        """A new layer with randomly initialised weights."""
        from attn_variants.mechanisms.coverage_layer import CoverageLayer

        return CoverageLayer(
            config.head_layout, hidden_size=config.hidden_size, bias=config.bias, longest=longest(config)
        )

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The keys and values of the source, and the coverage, sized for the longest source."""
        heads = config.head_layout
        row = Field((heads.query, heads.key_size))
        coverage = Field((heads.query, longest(config)))
        return {"source": Source({"key": row, "value": row}), "coverage": Slot({"sum": coverage})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of the projections, and of a score and a weighted value per pair."""
        inner = config.head_layout.query * config.head_layout.key_size
        linear = 2 * config.hidden_size * inner
        pairs = shape.batch * shape.query * shape.source
        flops = 2 * shape.batch * (shape.query + shape.encoded) * linear + 4 * pairs * inner
        biases = 2 * inner + config.hidden_size if config.bias else 0
        return Cost(flops=flops, allowed_flops=flops, parameters=2 * linear + 2 * inner + biases)


def longest(config: MechanismConfig) -> int:
    """The length of the longest source, in tokens."""
    return config.max_seq_len or LONGEST
