"""Scoring functions e = f(q, k), as data; a computation gives them their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from attn_core.heads import Heads
from attn_core.part import Part


@dataclass(frozen=True, kw_only=True)
class Score(Part):
    """A scoring function. Where it never `reads_keys`, a layer projects and remembers none."""

    equation: ClassVar[str]
    reads_keys: ClassVar[bool] = True

    def pair_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size
