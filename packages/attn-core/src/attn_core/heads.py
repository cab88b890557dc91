"""The head layout of attention, and the base class of the parts of a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The numbers and sizes of query heads and of the key/value heads they read.

    `key_value == query` is multi-head attention (Vaswani et al. 2017), `key_value == 1` multi-query
    (Shazeer 2019, arXiv 1911.02150), anything between grouped-query (Ainslie et al. 2023, arXiv 2305.13245).
    `groups[h]` is the key/value head of query head h; by default, equal groups of consecutive heads share one.
    """

    query: int
    key_value: int
    key_size: int
    value_size: int
    groups: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("query", "key_value", "key_size", "value_size"):
            if getattr(self, field) < 1:
                raise InvalidValue.of(f"heads.{field}", getattr(self, field), "a whole number from 1")
        if self.groups is None:
            if self.query % self.key_value:
                allowed = f"a divisor of the {self.query} query heads, or an explicit map `groups`"
                raise InvalidValue.of("heads.key_value", self.key_value, allowed)
        elif len(self.groups) != self.query or any(not 0 <= g < self.key_value for g in self.groups):
            allowed = f"{self.query} entries from 0 to {self.key_value - 1}"
            raise InvalidValue.of("heads.groups", self.groups, allowed)

    # Not cached: torch.compile cannot trace the lock that a cached property takes on first use.
    @property
    def group_of(self) -> tuple[int, ...]:
        """For each query head, the key/value head it reads."""
        if self.groups is not None:
            return self.groups
        group_size = self.query // self.key_value
        return tuple(head // group_size for head in range(self.query))

    @property
    def per_group(self) -> int | None:
        """Query heads per key/value head where the groups are equal and consecutive, else None."""
        if self.groups is None:
            return self.query // self.key_value
        group_size, remainder = divmod(self.query, self.key_value)
        regular = not remainder and self.group_of == tuple(head // group_size for head in range(self.query))
        return group_size if regular else None


@dataclass(frozen=True, kw_only=True)
class HeadRange:
    """Consecutive heads of a larger layer: those from `first`, counted from 0, of its `total` query heads."""

    first: int
    total: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.total:
            raise InvalidValue.of("heads_of.first", self.first, f"0 to {self.total - 1}")


@dataclass(frozen=True, kw_only=True)
class Part:
    """Base class of scores, modifiers, distributions and norms. Kernels accept or refuse a part by its `kind`.

    The `*_flops` methods count the FLOPs of matrix products of all heads, two per multiply-add.
    """

    kind: ClassVar[str]
    splits_heads: ClassVar[bool] = True
    """Whether heads are computed independently, and a head's index only selects its own learned weights."""

    def query_flops(self, heads: Heads) -> int:
        """FLOPs per query token, whatever the keys."""
        return 0

    def key_flops(self, heads: Heads) -> int:
        """FLOPs per key token, whatever the queries."""
        return 0

    def pair_flops(self, heads: Heads) -> int:
        """FLOPs per query-key pair."""
        return 0

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the learned weights by name; see `AttentionSpec.weights` for their names in kernel inputs."""
        return {}

    def num_parameters(self, heads: Heads) -> int:
        """Number of learned weights."""
        return sum(math.prod(shape) for shape in self.weights(heads).values())
