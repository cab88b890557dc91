"""Sparse Sinkhorn attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core import Cost, MechanismConfig, Paper, Shape
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.options import check_whole
from attn_variants.mechanisms.whole_sequence import ENCODER, WholeSequence


class SinkhornAttention(WholeSequence):
    """A token attends to its own block and to the block that sorting puts beside it, softly.

    The paper learns the sorting by a network with one output a block; here it follows from mean queries and keys, which
    needs no fixed number of blocks. It depends on all blocks: there is no causal form. With one block it is softmax
    attention.
    """

    name = "sinkhorn"
    summary = "blocks attend to themselves and to a softly sorted block"
    paper = Paper(title="Sparse Sinkhorn Attention", authors="Tay et al.", year=2020, arxiv="2002.11296")
    equation = (
        r"R = \mathrm{Sinkhorn}\left(\exp\frac{\bar Q \bar K^\top}{\tau \sqrt{d}}\right),\quad"
        r" o_b = \mathrm{softmax}\left(\frac{Q_b [K_b; (RK)_b]^\top}{\sqrt{d}}\right) [V_b; (RV)_b]"
    )
    sketch: ClassVar = {"block": 3}
    capabilities = ENCODER

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """Tokens of a `block`; `iterations` of Sinkhorn's normalisation; the `temperature` τ of the sorting."""

        block: int = 64
        iterations: int = 8
        temperature: float = 0.75

        def __post_init__(self) -> None:
            super().__post_init__()
            check_whole("block", self.block, "tokens")
            check_whole("iterations", self.iterations, "steps")
            if not self.temperature > 0:
                raise InvalidValue.of("temperature", self.temperature, "a number above 0")

    def attention(self, config: MechanismConfig) -> Any:
        """Blocks that are sorted."""
        from attn_variants.mechanisms.clusters.layers import SortedBlocks

        options = self.Config.of(config)
        return SortedBlocks(block=options.block, iterations=options.iterations, temperature=options.temperature)

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """Pairs of blocks, their mixture, and two blocks for every token, the last block filled up."""
        (heads, size), block = self.inner_size(config), self.Config.of(config).block
        blocks = -(-shape.query // block)
        inner = blocks**2 * size * (1 + 2 * block) + blocks * 4 * block**2 * size
        flops = self.projected(config, shape) + 2 * shape.batch * heads * inner
        return Cost(flops=flops, allowed_flops=flops, parameters=self.weights(config))
