"""Scores that the query alone decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_core.errors import InvalidValue
from attn_core.heads import Heads
from attn_core.score.base import Score


@dataclass(frozen=True, kw_only=True)
class Location(Score):
    """e_j = (W q)_j, whatever stands at key j (Luong et al. 2015, arXiv 1508.04025, location-based).

    `longest` is the most keys there can be; a key at a position from `longest` on is refused where it is met.
    `weight` is [heads, longest, key_size].
    """

    longest: int
    kind = "location"
    equation = r"(W q)_j"
    reads_keys = False

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise InvalidValue.of("location.longest", self.longest, "a whole number of keys from 1")

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (heads.query, self.longest, heads.key_size)}
