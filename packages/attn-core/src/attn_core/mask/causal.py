"""The causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, run


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and what came before (Vaswani et al. 2017, section 3.2.3)."""

    kind = "causal"

    def allows(self, query: Positions, key: Positions) -> Any:
        return key <= query

    @property
    def lookahead(self) -> int:
        return 0

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, min(keys, query + 1))

    def count(self, queries: int, keys: int) -> int:
        visible = min(queries, keys)
        return visible * (2 * keys - visible + 1) // 2
