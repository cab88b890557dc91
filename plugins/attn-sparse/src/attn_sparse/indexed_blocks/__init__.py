"""MiniMax-M3's sparse attention: an indexer selects blocks of keys for each group of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Computation,
    Cost,
    DeclaredMechanism,
    Field,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    hookimpl,
)
from attn_core.cost import SelectedBlockPairs
from attn_core.kernels.selected import SelectedBlocksSpec
from attn_core.norms import QkNorm

from attn_sparse.indexed_blocks.options import IndexedBlocksConfig

if TYPE_CHECKING:
    from attn_sparse.indexed_blocks.selection import IndexedBlocksAttention


class IndexedBlocks(DeclaredMechanism):
    """The best key of a block, by a small index head for each group of query heads, decides whether the group reads it.

    The newest blocks, the query's own first, are always read, and count among the `top`.
    """

    name = "indexed_blocks"
    counts_from_start = True  # blocks are counted from the first row
    splits_heads = True
    summary = "attention to the newest blocks and to those with the best key by an indexer's head for each group"
    paper = Paper(title="MiniMax-M3", authors="MiniMax", year=2026)
    equation = (
        r"O_i = \mathrm{softmax}\left(\frac{q_i K_{I_i}^\top}{\sqrt{d_k}} + M\right) V_{I_i},\quad"
        r" I_i = \{j : \lfloor j/B \rfloor \in \mathrm{top}_{k,\, b}\; \max_{s \le i,\, \lfloor s/B \rfloor = b}"
        r" q^I_{ig} \cdot k^I_s\}"
    )
    sketch: ClassVar = {"block": 2, "top": 3, "index_size": 8}
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.BIDIRECTIONAL, Capability.SHARES_KV}

    Config = IndexedBlocksConfig

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The causal attention that is restricted to the chosen blocks."""
        own = self.Config.of(config)
        norm = None if own.norm_eps is None else QkNorm(eps=own.norm_eps)
        return AttentionSpec(heads=own.head_layout, mask=Causal(), norm=norm, rotary=own.rotary)

    def inner(self, config: MechanismConfig) -> IndexedBlocksAttention:
        """The indexer with random weights, and the attention to the blocks that it selects."""
        from attn_sparse.indexed_blocks.selection import IndexedBlocksAttention

        return IndexedBlocksAttention(self.spec(config), self.Config.of(config))

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """Causal attention up to `top` blocks, which are all read; beyond, attention to the blocks that this module
        chooses, by a kernel."""
        if self.Config.of(config).reads_all(tokens):
            return super().computations(config, tokens)
        return (Computation(part="selected blocks", asked=SelectedBlocksSpec(heads=config.head_layout)),)

    def further_fields(self, config: MechanismConfig) -> Mapping[str, Field]:
        """One index key per token, shared by the index heads."""
        return {"index": Field((self.Config.of(config).index_size,))}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """Up to `top` blocks, the cost of causal attention and index keys; beyond, that of projections, of an index
        score for each key of earlier blocks, and of the pairs with the keys of chosen blocks.

        The latter is the cost of inference, where a block is only computed for the queries that chose it; in training
        it is computed for up to 63 more queries per block, and the indexer's loss besides.
        """
        heads, own = config.head_layout, self.Config.of(config)
        pairs, size = SelectedBlockPairs(block=own.block, top=own.top), own.index_size
        key = config.hidden_size * size
        parameters = key * (heads.key_value + 1) + 2 * size
        remembered = 2 * shape.batch * shape.query * key
        if own.reads_all(shape.key):
            keys = Cost(flops=remembered, allowed_flops=remembered, parameters=parameters)
            return super().cost(config, shape) + keys
        tokens = remembered * (heads.key_value + 1)
        score = 2 * heads.key_value * size
        pair = 2 * heads.query * (heads.key_size + heads.value_size)
        scored = shape.batch * sum(queries * keys for queries, keys in own.scored(shape.query, shape.key))
        chosen = Cost(
            flops=tokens + score * scored + pairs.met(shape) * pair,
            allowed_flops=tokens + score * pairs.past(shape) * own.block + pairs.allowed(shape) * pair,
            parameters=parameters,
        )
        return self.projection_cost(config, shape) + chosen


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [IndexedBlocks()]
