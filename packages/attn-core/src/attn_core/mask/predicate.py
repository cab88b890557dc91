"""A mask given as a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attn_core.mask.mask import Mask, Positions


@dataclass(frozen=True)
class Predicate(Mask):
    """A mask given as a function of positions, FlexAttention's `mask_mod` without batch and head.

    `function(query, key)` must use operators that take integers and tensors alike. `back` and `ahead`
    state the bounds that the function keeps; without them nothing is assumed.
    """

    function: Callable[[Positions, Positions], Any]
    back: int | None = None
    ahead: int | None = None
    kind = "predicate"

    def allows(self, query: Positions, key: Positions) -> Any:
        return self.function(query, key)

    @property
    def lookback(self) -> int | None:
        return self.back

    @property
    def lookahead(self) -> int | None:
        return self.ahead

    @property
    def closed(self) -> bool:
        return False
