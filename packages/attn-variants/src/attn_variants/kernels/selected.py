"""Reading chosen blocks of keys: in tiles, and block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, Condition, OneOf
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksKernel, SelectedBlocksProblem

if TYPE_CHECKING:
    from torch import Tensor


class SelectedBlocksTiled(SelectedBlocksKernel):
    """Accepts all choices; gathers the queries that chose a block."""

    name = "selected_blocks_tiled"
    summary = "blocks chosen query by query, met by tiles of queries, in torch; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {field: Anything() for field in SelectedBlocksProblem.defaults()}

    def cost(self, problem: SelectedBlocksProblem) -> float:  # noqa: ARG002 -- the unit is the same for every problem
        """The unit of all costs."""
        return 1.0

    def run(self, selected: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
        """Outputs; see `compute.selected_blocks`."""
        from attn_variants.compute.selected_blocks import attend_in_pieces

        return attend_in_pieces(selected, blocks)


class SelectedBlocksWhole(SelectedBlocksKernel):
    """Reads blocks of whole sequences by torch's flash attention, each with all who chose it."""

    name = "selected_blocks_whole"
    summary = "blocks chosen query by query, each met by all who chose it, by torch's flash attention; whole sequences"
    accepts: ClassVar[Mapping[str, Condition]] = {
        **dict.fromkeys(("key_size", "value_size", "query_heads", "key_value_heads"), Anything()),
        "dtype": OneOf("float32", "float64", "bfloat16", "float16"),
    }

    def cost(self, problem: SelectedBlocksProblem) -> float:  # noqa: ARG002 -- the share is about the same for every problem
        """A third, as measured at 4096 tokens on a CPU."""
        return 0.3

    def run(self, selected: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
        """Outputs; see `compute.selected_blocks`. A compiled graph, which cannot count queries, takes tiles."""
        import torch

        from attn_variants.compute.selected_blocks import attend_in_pieces, attend_whole

        return (attend_in_pieces if torch.compiler.is_compiling() else attend_whole)(selected, blocks)
