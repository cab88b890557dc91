"""The first positions, seen by all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, run


@dataclass(frozen=True)
class Prefix(Mask):
    """The first `length` positions are seen by every query (prefix language models, Raffel et al. 2020).

    As attention sinks (Xiao et al. 2023, arXiv 2309.17453): `Window(left=w) | Prefix(s) & Causal()`.
    """

    length: int
    kind = "prefix"

    def allows(self, query: Positions, key: Positions) -> Any:
        return (key < self.length) & ((query <= key) | (query > key))

    def runs(self, query: int, keys: int) -> Runs:
        return run(0, min(self.length, keys))

    def count(self, queries: int, keys: int) -> int:
        return queries * max(0, min(self.length, keys))
