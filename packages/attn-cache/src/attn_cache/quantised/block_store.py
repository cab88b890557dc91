"""The store of a model whose token rows are coded block by block."""

from __future__ import annotations

from attn_core.stores import ModelSpecs, StoreSize

from attn_cache.quantised.block_rows import BlockRows
from attn_cache.quantised.block_states import BlockStateLayout
from attn_cache.quantised.blocks import BlockLayout
from attn_cache.shared import SharedStore


class CodedBlockStore(SharedStore):
    """A shared store of blocks: requests that begin alike share whole blocks, which are codes.

    What a query sees must not depend on how its prompt was cut into steps, so a step ends where a block does.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, layout: BlockLayout) -> None:
        rows = BlockRows(specs, size, layout)
        super().__init__(specs, size, rows)
        self._layout = BlockStateLayout(specs, layout, size.dtype)
        self._blocks = rows
        self._block = layout.block

    def chunk(self, computed: int, length: int, prompt: int) -> int:
        """As `SharedStore.chunk`, and at most the tokens that are missing of a block."""
        return super().chunk(computed, min(length, self._block - computed % self._block), prompt)

    def rewind(self, request: int, tokens: int) -> int:
        """As `Store.rewind`, and to the start of a block whose rows are codes by now, as those cannot be undone."""
        coded = tokens < self._blocks.oldest_plain(self._place(request))
        return super().rewind(request, tokens // self._block * self._block if coded else tokens)
