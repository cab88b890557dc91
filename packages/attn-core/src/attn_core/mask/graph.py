"""The edges of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attn_core.errors import InvalidValue
from attn_core.mask.dense import Dense
from attn_core.mask.mask import Mask, Positions
from attn_core.mask.runs import Runs, of_keys


@dataclass(frozen=True)
class Graph(Mask):
    """Node i of the graph stands at position i and sees the nodes listed for it; a node without any sees nothing.

    Build it with `Graph.of`, from edges (query, key).
    """

    neighbours: tuple[tuple[int, ...], ...]
    kind = "graph"

    def __post_init__(self) -> None:
        nodes = len(self.neighbours)
        for query, seen in enumerate(self.neighbours):
            if any(not 0 <= key < nodes for key in seen):
                raise InvalidValue.of(f"graph.neighbours[{query}]", seen, f"nodes from 0 to {nodes - 1}")

    @classmethod
    def of(cls, nodes: int, edges: Iterable[tuple[int, int]]) -> Graph:
        """The graph of `nodes` nodes in which, for each edge (query, key), the query sees the key."""
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
