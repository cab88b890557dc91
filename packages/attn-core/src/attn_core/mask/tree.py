"""Trees of candidate tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attn_core.errors import InvalidValue
from attn_core.mask.checks import at_least
from attn_core.mask.graph import Graph
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, run, unite


@dataclass(frozen=True)
class Tree(Mask):
    """A node sees itself, its ancestors and all of the context before the tree (Miao et al. 2023, arXiv 2305.09781).

    Node i stands at position `context + i` and `parents[i]` is its parent's number, -1 for a root. Positions of the
    context see each other causally. Every path from a root to a leaf sees exactly what it would see alone.
    """

    parents: tuple[int, ...]
    context: int = 0
    kind = "tree"

    def __post_init__(self) -> None:
        at_least("tree.context", self.context, 0)
        nodes = len(self.parents)
        if any(not -1 <= parent < nodes for parent in self.parents):
            raise InvalidValue.of("tree.parents", self.parents, f"nodes from 0 to {nodes - 1}, or -1 for a root")
        for node in range(nodes):
            self.path(node)

    def path(self, node: int) -> list[int]:
        """A node, its parent, and so on to its root; raises `InvalidValue` where the parents run in a cycle."""
        found = [node]
        while (parent := self.parents[found[-1]]) >= 0:
            if parent in found:
                raise InvalidValue.of("tree.parents", self.parents, f"no cycles; {[*found, parent]} is one")
            found.append(parent)
        return found

    def allows(self, query: Positions, key: Positions) -> Any:
        behind = query >= self.context
        before = (key < self.context) & (behind | (key <= query))
        return before | (self._ancestors.allows(query - self.context, key - self.context) & behind)

    @property
    def lookback(self) -> int | None:
        return None if self.context else self._ancestors.lookback

    @property
    def lookahead(self) -> int:
        return self._ancestors.lookahead

    def runs(self, query: int, keys: int) -> Runs:
        if query < self.context:
            return run(0, min(keys, query + 1))
        tree = self._ancestors.runs(query - self.context, max(0, keys - self.context))
        shifted = [(start + self.context, stop + self.context) for start, stop in tree]
        return unite(run(0, min(keys, self.context)), shifted)

    @cached_property
    def _ancestors(self) -> Graph:
        return Graph(tuple(tuple(sorted(self.path(node))) for node in range(len(self.parents))))
