"""A mask in FlexAttention's form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.mask.mask import Mask

MaskMod = Callable[[Any, Any, Any, Any], Any]
"""`(batch, head, query, key)` -> whether the pair may meet; integer tensors that broadcast, in and out."""


def mask_mod(mask: Mask, queries: int, keys: int) -> MaskMod:
    """The function that `torch.nn.attention.flex_attention.create_block_mask` takes.

    FlexAttention counts queries from 0; here query 0 of `queries` stands at position `keys - queries`.
    """
    bound, offset = mask.over(keys), keys - queries

    def same_for_all(batch: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 -- FlexAttention's form
        return bound.allows(query + offset, key)

    def differs_by_head(batch: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 -- FlexAttention's form
        seen = head < 0
        for one in range(bound.heads or 0):
            seen = seen | ((head == one) & bound.of_head(one).allows(query + offset, key))
        return seen

    return same_for_all if bound.heads is None else differs_by_head
