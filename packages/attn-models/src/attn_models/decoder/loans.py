"""What blocks lend one another in one pass over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core import Fields
from torch import Tensor

from attn_models.decoder.block import Block


class Loans:
    """Keys and values of the blocks that others borrow from, made once; `lenders` has one entry a block."""

    def __init__(self, lenders: Sequence[int]) -> None:
        self._lenders = lenders
        self._wanted = {lender for layer, lender in enumerate(lenders) if lender < layer}
        self._lent: dict[int, Fields] = {}

    def of(self, layer: int, block: Block, hidden: Tensor) -> Fields | None:
        """What the block, which is about to be given `hidden`, borrows, if only from itself; None where from nobody."""
        if layer in self._wanted:
            self._lent[layer] = block.lend(hidden)
        return self._lent.get(self._lenders[layer])
