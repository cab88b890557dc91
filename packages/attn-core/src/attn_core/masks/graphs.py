"""Masks given pair by pair: dense tables, graphs, block-sparse tables, and trees of draft tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from attn_core.checks import keep_tuples, require_whole
from attn_core.errors import InvalidValue
from attn_core.masks.base import Mask, Positions, pick, within
from attn_core.masks.ranges import Runs, merged, of_keys, run, unite


@dataclass(frozen=True)
class Dense(Mask):
    """A table whose row q marks the keys that the query at position q sees, one byte each; nothing is seen outside it.

    Build it with `Dense.of`, from nested lists such as a boolean tensor's `tolist()`.
    """

    rows: tuple[bytes, ...]
    kind = "dense"

    def __post_init__(self) -> None:
        keep_tuples(self, "rows")
        if len({len(row) for row in self.rows}) > 1:
            raise InvalidValue.of("dense.rows", [len(row) for row in self.rows], "rows of equal length")

    @classmethod
    def of(cls, rows: Iterable[Iterable[object]]) -> Self:
        """Build the mask from rows of truth values."""
        return cls(tuple(bytes(bool(entry) for entry in row) for row in rows))

    @property
    def columns(self) -> int:
        """Number of keys in the table."""
        return len(self.rows[0]) if self.rows else 0

    def allows(self, query: Positions, key: Positions) -> Any:
        row, query_inside = within(query, len(self.rows))
        column, key_inside = within(key, self.columns)
        inside = query_inside & key_inside
        return inside & (pick(self._flat, row * self.columns + column) == 1) if self._flat else inside

    @cached_property
    def lookback(self) -> int:
        seen = [query - row.index(1) for query, row in enumerate(self.rows) if 1 in row]
        return max([0, *seen])

    @cached_property
    def lookahead(self) -> int:
        seen = [row.rindex(1) - query for query, row in enumerate(self.rows) if 1 in row]
        return max([0, *seen])

    def runs(self, query: int, keys: int) -> Runs:
        if not 0 <= query < len(self.rows):
            return []
        return of_keys(key for key, seen in enumerate(self.rows[query][:keys]) if seen)

    @cached_property
    def _flat(self) -> bytes:
        return b"".join(self.rows)


@dataclass(frozen=True)
class Graph(Mask):
    """A directed graph: node i, at position i, sees the nodes `neighbours[i]`, and nothing if there are none.

    Build it with `Graph.of`, from edges (query, key).
    """

    neighbours: tuple[tuple[int, ...], ...]
    kind = "graph"

    def __post_init__(self) -> None:
        keep_tuples(self, "neighbours")
        nodes = len(self.neighbours)
        for query, seen in enumerate(self.neighbours):
            if any(not 0 <= key < nodes for key in seen):
                raise InvalidValue.of(f"graph.neighbours[{query}]", seen, f"nodes from 0 to {nodes - 1}")

    @classmethod
    def of(cls, nodes: int, edges: Iterable[tuple[int, int]]) -> Graph:
        """Build the graph of `nodes` nodes in which, for each edge (query, key), the query sees the key."""
        seen: list[set[int]] = [set() for _ in range(nodes)]
        for query, key in edges:
            if not (0 <= query < nodes and 0 <= key < nodes):
                raise InvalidValue.of("graph.edges", (query, key), f"pairs of nodes from 0 to {nodes - 1}")
            seen[query].add(key)
        return cls(tuple(tuple(sorted(keys)) for keys in seen))

    def allows(self, query: Positions, key: Positions) -> Any:
        if isinstance(query, int) and isinstance(key, int):
            return 0 <= query < len(self.neighbours) and key in self.neighbours[query]
        return self._dense.allows(query, key)

    @cached_property
    def lookback(self) -> int:
        return max([0, *(query - min(seen) for query, seen in enumerate(self.neighbours) if seen)])

    @cached_property
    def lookahead(self) -> int:
        return max([0, *(max(seen) - query for query, seen in enumerate(self.neighbours) if seen)])

    def runs(self, query: int, keys: int) -> Runs:
        if not 0 <= query < len(self.neighbours):
            return []
        return of_keys(sorted({key for key in self.neighbours[query] if key < keys}))

    @cached_property
    def _dense(self) -> Dense:
        nodes = range(len(self.neighbours))
        return Dense.of([key in row for key in nodes] for row in map(frozenset, self.neighbours))


@dataclass(frozen=True)
class BlockSparse(Mask):
    """Positions are cut into blocks of `block`; a query of block r sees all keys of the blocks `rows[r]`."""

    block: int
    rows: tuple[tuple[int, ...], ...]
    kind = "blocks"

    def __post_init__(self) -> None:
        require_whole("blocks.block", self.block, ge=1)
        keep_tuples(self, "rows")
        for row, seen in enumerate(self.rows):
            if any(not 0 <= key < len(self.rows) for key in seen):
                raise InvalidValue.of(f"blocks.rows[{row}]", seen, f"blocks from 0 to {len(self.rows) - 1}")

    def allows(self, query: Positions, key: Positions) -> Any:
        return self._blocks.allows(query // self.block, key // self.block)

    @property
    def lookback(self) -> int:
        return (self._blocks.lookback + 1) * self.block - 1

    @property
    def lookahead(self) -> int:
        return (self._blocks.lookahead + 1) * self.block - 1

    def runs(self, query: int, keys: int) -> Runs:
        row = query // self.block
        seen = self.rows[row] if 0 <= row < len(self.rows) else ()
        pieces = ((key * self.block, min(keys, (key + 1) * self.block)) for key in sorted(seen))
        return merged(pieces)

    @cached_property
    def _blocks(self) -> Graph:
        return Graph(self.rows)


@dataclass(frozen=True)
class Tree(Mask):
    """A node sees itself, its ancestors and all of the context before the tree (Miao et al. 2023, arXiv 2305.09781).

    Node i has position `context + i`, and `parents[i]` is the number of its parent, -1 for a root. Positions of the
    context see each other causally. A path from a root to a leaf sees exactly what it would see without the others.
    """

    parents: tuple[int, ...]
    context: int = 0
    kind = "tree"

    def __post_init__(self) -> None:
        require_whole("tree.context", self.context, ge=0)
        keep_tuples(self, "parents")
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
                raise InvalidValue.of("tree.parents", self.parents, f"no cycle such as {[*found, parent]}")
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
