"""Long short-term memory-networks."""

from __future__ import annotations

from typing import Any

from attn_core import (
    Capability,
    Causal,
    ComputedMechanism,
    Cost,
    Field,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    Slot,
    StateSpecs,
    Step,
)

from attn_variants.mechanisms.common import BASIC


class LongShortTermMemoryNetwork(ComputedMechanism):
    """An LSTM that attends to tapes of all its earlier hidden states and cell states instead of reading the last ones.

    Each head is an LSTM of size `head_dim` with its own tapes; with one head it is that of the paper. The first token
    of a sequence has empty tapes and reads zeros.
    """

    name = "lstmn"
    summary = "an LSTM that attends to all its earlier states"
    paper = Paper(
        title="Long Short-Term Memory-Networks for Machine Reading",
        authors="Cheng et al.",
        year=2016,
        arxiv="1601.06733",
    )
    equation = (
        r"s_t = \mathrm{softmax}_{i < t}\left(v^\top \tanh(W_h h_i + W_x x_t + W_{\tilde h} \tilde h_{t-1})\right),"
        r"\quad \tilde h_t = \sum_i s_t^i h_i,\quad \tilde c_t = \sum_i s_t^i c_i,\quad"
        r" (h_t, c_t) = \mathrm{LSTM}(x_t, \tilde h_t, \tilde c_t)"
    )
    capabilities = BASIC | frozenset(
        {
            Capability.CAUSAL,
            Capability.INCREMENTAL,
            Capability.EXACT,
            Capability.WEIGHTS,
            Capability.PADDING,
        }
    )
    sequential = True

    def build(self, config: MechanismConfig) -> Any:
        """A new `LstmnLayer`; raises `InvalidValue` unless the key/value heads divide the heads."""
        from attn_variants.mechanisms.lstmn_layer import LstmnLayer

        return LstmnLayer(config.head_layout, hidden_size=config.hidden_size, bias=config.bias)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The hidden and cell states and the projected keys of every token, and the last summary of hidden states."""
        heads = config.head_layout
        row = Field((heads.query, heads.key_size))
        return {"tapes": Paged({"hidden": row, "memory": row, "key": row}), "summary": Slot({"hidden": row})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections and gates per token, and of a score and reads of both tapes per earlier token."""
        heads = config.head_layout
        inner = heads.query * heads.key_size
        linear = config.hidden_size * 6 * inner
        square = heads.query * 6 * heads.key_size**2
        tokens = shape.batch * shape.query
        # The first token of a sequence reads nothing, so its query is not computed.
        firsts = shape.batch if shape.query >= shape.key else 0
        pairs = shape.batch * (Causal().count(shape.query, shape.key) - shape.query)
        flops = 2 * tokens * (linear + square) - 2 * firsts * inner * heads.key_size + 2 * pairs * 3 * inner
        biases = 4 * inner + (config.hidden_size if config.bias else 0)
        return Cost(flops=flops, allowed_flops=flops, parameters=linear + square + inner + biases)
