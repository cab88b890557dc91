"""Which key/value heads of a model become one."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidValue


@dataclass(frozen=True)
class HeadMap:
    """`groups[head]` is the new key/value head, from 0, of each old one; every new head has at least one old one."""

    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.groups or set(self.groups) != set(range(max(self.groups, default=-1) + 1)):
            raise InvalidValue.of(
                "groups", self.groups, "for each key/value head a group, numbered from 0 without gaps"
            )

    @classmethod
    def consecutive(cls, heads: int, groups: int) -> HeadMap:
        """`heads` in equal groups of neighbours; raises `InvalidValue` where they do not divide."""
        if groups < 1 or heads % groups:
            raise InvalidValue.of("kv_heads", groups, f"a divisor of the {heads} key/value heads, or an explicit map")
        share = heads // groups
        return cls(tuple(head // share for head in range(heads)))

    @property
    def count(self) -> int:
        """The number of new heads."""
        return max(self.groups) + 1

    def members(self, group: int) -> list[int]:
        """The old heads of a group, in order."""
        return [head for head, own in enumerate(self.groups) if own == group]
