"""The full mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, run


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    kind = "full"

    def allows(self, query: Positions, key: Positions) -> Any:
        # Always true, also for the negative positions of queries that outnumber the keys; broadcasts both.
        return (query <= key) | (query > key)

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, keys)

    def count(self, queries: int, keys: int) -> int:
        return queries * keys
