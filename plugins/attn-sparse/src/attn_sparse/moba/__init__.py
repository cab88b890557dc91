"""Mixture of block attention (MoBA): each query attends to its own block and the best of the past ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Computation,
    Cost,
    DeclaredMechanism,
    Mechanism,
    MechanismConfig,
    Paper,
    Shape,
    Step,
    hookimpl,
)
from attn_core.checks import checked, require_whole
from attn_core.cost import SelectedBlockPairs
from attn_core.kernels.selected import SelectedBlocksSpec

if TYPE_CHECKING:
    from attn_sparse.moba.blocks import BlockMixture


class Moba(DeclaredMechanism):
    """Keys are split into blocks; a query scores past blocks by their mean key and attends to the best and its own."""

    name = "moba"
    counts_from_start = True  # blocks are counted from the first row
    splits_heads = True
    summary = "attention to a query's own block and to the past blocks with the best-matching mean keys"
    paper = Paper(
        title="MoBA: Mixture of Block Attention for Long-Context LLMs",
        authors="Lu et al.",
        year=2025,
        arxiv="2502.13189",
    )
    equation = (
        r"O_i = \mathrm{softmax}\left(\frac{q_i K_{I_i}^\top}{\sqrt{d_k}} + M\right) V_{I_i},\quad"
        r" I_i = \{j : \lfloor j/B \rfloor \in \{\lfloor i/B \rfloor\} \cup"
        r" \mathrm{top}_{k-1,\, b < \lfloor i/B \rfloor}\; q_i^\top \mathrm{mean}(K_{[bB, (b+1)B)})\}"
    )
    sketch: ClassVar = {"block": 2, "top": 3}
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.BIDIRECTIONAL}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """Blocks have `block` tokens; a query attends to at most `top` of them, its own included."""

        block: int = checked(512, require_whole, ge=1)
        top: int = checked(3, require_whole, ge=1)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The causal attention that is restricted to the chosen blocks."""
        return AttentionSpec(heads=config.head_layout, mask=Causal(), rotary=config.rotary)

    def inner(self, config: MechanismConfig) -> BlockMixture:
        """The choice of blocks and the attention to them; it has no learned weights."""
        from attn_sparse.moba.blocks import BlockMixture

        block, top = sizes(config)
        return BlockMixture(self.spec(config), block=block, top=top)

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:  # noqa: ARG002 -- the same at all lengths
        """Attention to the chosen blocks by a kernel; the blocks are chosen by this module."""
        return (Computation(part="selected blocks", asked=SelectedBlocksSpec(heads=config.head_layout)),)

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of projections, a score for each block, and the pairs of every query and the keys of its blocks.

        This is the cost of inference, where a block is only computed for the queries that chose it; in training it is
        computed for up to 63 more queries per block.
        """
        heads = config.head_layout
        block, top = sizes(config)
        pairs = SelectedBlockPairs(block=block, top=top)
        scored = shape.batch * shape.query * -(-shape.key // block)
        score, pair = 2 * heads.query * heads.key_size, 2 * heads.query * (heads.key_size + heads.value_size)
        chosen = Cost(
            flops=scored * score + pairs.met(shape) * pair,
            allowed_flops=pairs.past(shape) * score + pairs.allowed(shape) * pair,
            parameters=0,
        )
        return self.projection_cost(config, shape) + chosen


def sizes(config: MechanismConfig) -> tuple[int, int]:
    """The number of tokens per block, and of blocks per query."""
    own = Moba.Config.of(config)
    return own.block, own.top


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Moba()]
