"""Distances in the tree of a sentence's dependencies."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.errors import InvalidValue
from attn_core.modifier.relative import RelativeKeys, RelativeValues


@dataclass(frozen=True)
class DependencyTree:
    """A parse: `heads[i]` is the token that token i depends on, -1 for the root, of which there is one.

    Tokens behind the parse depend on the one before them each, so that without a parse, (), a sequence is a chain.
    Raises `InvalidValue` for heads that are no tokens, for several roots, and for a cycle, whose tokens it names.
    """

    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tokens = len(self.heads)
        for token, head in enumerate(self.heads):
            if type(head) is not int or not -1 <= head < tokens:
                raise InvalidValue.of(f"heads[{token}]", head, f"a token from 0 to {tokens - 1}, or -1 for the root")
        roots = [token for token, head in enumerate(self.heads) if head < 0]
        if len(roots) > 1:
            raise InvalidValue.of("heads", f"the roots {roots}", "one root, -1, for each sentence")
        self._check_cycles()

    @property
    def depths(self) -> tuple[int, ...]:
        """Steps from each token up to the root; the root's own are 0."""
        found: list[int] = [-1] * len(self.heads)
        for token in range(len(self.heads)):
            path = [token]
            while found[path[-1]] < 0 <= self.heads[path[-1]]:
                path.append(self.heads[path[-1]])
            top = max(found[path[-1]], 0)
            for above, node in enumerate(reversed(path)):
                found[node] = top + above
        return tuple(found)

    @property
    def ancestors(self) -> tuple[tuple[bool, ...], ...]:
        """Row i, column j: whether token j is token i or one above it."""
        rows = []
        for token in range(len(self.heads)):
            row, node = [False] * len(self.heads), token
            while node >= 0:
                row[node], node = True, self.heads[node]
            rows.append(tuple(row))
        return tuple(rows)

    def _check_cycles(self) -> None:
        done: set[int] = set()
        for token in range(len(self.heads)):
            path: dict[int, None] = {}
            node = token
            while node >= 0 and node not in done:
                if node in path:
                    cycle = [*list(path)[list(path).index(node) :], node]
                    raise InvalidValue.of("heads", "the cycle " + " -> ".join(map(str, cycle)), "a tree")
                path[node] = None
                node = self.heads[node]
            done.update(path)


@dataclass(frozen=True, kw_only=True)
class DependencyKeys(RelativeKeys):
    """`RelativeKeys` over distances in a tree instead of the sequence (Wang et al. 2019, arXiv 1909.00383).

    Of tokens of which one is above the other it is the depth of the query less that of the key, of any others the sum
    of both depths, negative where the query is the later one.
    """

    tree: DependencyTree
    kind = "dependency_keys"


@dataclass(frozen=True, kw_only=True)
class DependencyValues(RelativeValues):
    """`RelativeValues` over the distances of `DependencyKeys`."""

    tree: DependencyTree
    kind = "dependency_values"
