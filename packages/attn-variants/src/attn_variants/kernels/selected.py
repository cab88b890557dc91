"""Kernels of attention over selected blocks of keys: in tiles of queries, and block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.kernels.base import Anything, Condition, OneOf
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksKernel, SelectedBlocksProblem

if TYPE_CHECKING:
    from torch import Tensor


class SelectedBlocksTiled(SelectedBlocksKernel):
    """Gathers the queries that selected a block into tiles; supports every selection."""

    name = "selected_blocks_tiled"
    summary = "attention to blocks selected per query, in torch by tiles of queries; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {field: Anything() for field in SelectedBlocksProblem.defaults()}

    def cost(self, problem: SelectedBlocksProblem) -> float:  # noqa: ARG002 -- the unit is the same for every problem
        """Always 1: costs are relative to this kernel."""
        return 1.0

    def run(self, selected: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
        """The outputs; see `compute.selected_blocks.attend_in_pieces`."""
        from attn_variants.compute.selected_blocks import attend_in_pieces

        return attend_in_pieces(selected, blocks)


class SelectedBlocksWhole(SelectedBlocksKernel):
    """Computes each block of a whole sequence with all queries that selected it, by PyTorch's flash attention."""

    name = "selected_blocks_whole"
    summary = "attention to blocks selected per query, block by block with torch's flash attention; whole sequences"
    accepts: ClassVar[Mapping[str, Condition]] = {
        **dict.fromkeys(("key_size", "value_size", "query_heads", "key_value_heads"), Anything()),
        "dtype": OneOf("float32", "float64", "bfloat16", "float16"),
    }

    def cost(self, problem: SelectedBlocksProblem) -> float:  # noqa: ARG002 -- the share is about the same for every problem
        """About a third of `SelectedBlocksTiled`, as measured at 4096 tokens on a CPU."""
        return 0.3

    def run(self, selected: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
        """The outputs; see `compute.selected_blocks.attend_whole`.

        Compiled graphs use `attend_in_pieces`, as the number of queries of each block is not known in a graph.
        """
        import torch

        from attn_variants.compute.selected_blocks import attend_in_pieces, attend_whole

        return (attend_in_pieces if torch.compiler.is_compiling() else attend_whole)(selected, blocks)
