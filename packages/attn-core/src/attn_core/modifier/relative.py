"""Learned tables over the distance between a query and a key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core.errors import InvalidValue
from attn_core.heads import Heads
from attn_core.modifier.base import Modifier

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, kw_only=True)
class BiasTable(Modifier):
    """Adds a learned number per head and bucket of distances: `table` [buckets, heads]."""

    def rows(self) -> int:
        """Number of buckets."""
        raise TypeError(f"{type(self).__name__} does not say how many buckets it has")

    @property
    def far(self) -> int:
        """The distance from which on, to either side, all share a bucket."""
        raise TypeError(f"{type(self).__name__} does not say how far it tells distances apart")

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance, key less query, int64; of the same shape. Only operators of tensors are used."""
        raise TypeError(f"{type(self).__name__} does not say which bucket {distance} has")

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"table": (self.rows(), heads.query)}


@dataclass(frozen=True, kw_only=True)
class T5Bias(BiasTable):
    """Buckets of one distance each while near, growing with the logarithm up to `max_distance` (T5, arXiv 1910.10683).

    `bidirectional` gives half of the `buckets` to keys after the query; otherwise these share the bucket of
    distance zero.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    kind = "t5_bias"

    def __post_init__(self) -> None:
        least = 4 if self.bidirectional else 2
        if self.buckets < least or self.buckets % (2 if self.bidirectional else 1):
            even = "an even number" if self.bidirectional else "a whole number"
            raise InvalidValue.of("t5_bias.buckets", self.buckets, f"{even} from {least}")
        if self.max_distance <= self.one_by_one:
            allowed = f"more than the {self.one_by_one} distances that have buckets of their own"
            raise InvalidValue.of("t5_bias.max_distance", self.max_distance, allowed)

    @property
    def one_side(self) -> int:
        """Buckets of one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    @property
    def one_by_one(self) -> int:
        """Distances from 0 that have a bucket of their own."""
        return self.one_side // 2

    def rows(self) -> int:
        return self.buckets

    @property
    def far(self) -> int:
        # Where the last bucket begins is rounded; one further on, nothing is left to round.
        return self.max_distance + 1

    def bucket(self, distance: Tensor) -> Tensor:
        side = (distance > 0) * self.one_side if self.bidirectional else 0
        away = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        near = self.one_by_one
        # In float32, as checkpoints were trained: a distance on the edge of two buckets must fall on the same side.
        share = (away.clamp(min=1).float() / near).log() / math.log(self.max_distance / near)
        grown = (near + (share * (self.one_side - near)).long()).clamp(max=self.one_side - 1)
        found: Tensor = side + away.where(away < near, grown)
        return found


@dataclass(frozen=True, kw_only=True)
class RelativeBias(BiasTable):
    """One bucket per distance j - i, those beyond `clip` with that of `clip`; 2 clip + 1 in all."""

    clip: int
    kind = "relative_bias"

    def __post_init__(self) -> None:
        check_clip(self.kind, self.clip)

    def rows(self) -> int:
        return 2 * self.clip + 1

    @property
    def far(self) -> int:
        return self.clip

    def bucket(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.clip, self.clip) + self.clip


@dataclass(frozen=True, kw_only=True)
class RelativeVectors(Modifier):
    """A learned vector per distance j - i, those beyond `clip` with that of `clip` (Shaw et al. 2018, 1803.02155).

    `table` [heads, 2 clip + 1, size], or [1, 2 clip + 1, size] where heads `share` one.
    """

    clip: int
    share: bool = False

    def __post_init__(self) -> None:
        check_clip(self.kind, self.clip)

    def size(self, heads: Heads) -> int:
        """Length of the vectors."""
        raise TypeError(f"{type(self).__name__} does not say how long its vectors are")

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * (2 * self.clip + 1) * self.size(heads)

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"table": (1 if self.share else heads.query, 2 * self.clip + 1, self.size(heads))}


@dataclass(frozen=True, kw_only=True)
class RelativeKeys(RelativeVectors):
    """Adds q·a_{j-i} / √d_k: the vector is added to the key before the scaled product (Shaw et al. 2018)."""

    kind = "relative_keys"

    def size(self, heads: Heads) -> int:
        return heads.key_size


@dataclass(frozen=True, kw_only=True)
class RelativeValues(RelativeVectors):
    """The output is Σ α_ij (v_j + a_{j-i}): the scores are left as they are (Shaw et al. 2018)."""

    kind = "relative_values"

    def size(self, heads: Heads) -> int:
        return heads.value_size


def check_clip(kind: str, clip: object) -> None:
    """Raise `InvalidValue` unless distances can be clipped there."""
    if not isinstance(clip, int) or clip < 0:
        raise InvalidValue.of(f"{kind}.clip", clip, "a whole number of positions from 0")
