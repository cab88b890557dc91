"""Sets of keys as sorted, disjoint ranges `(start, stop)`, and set operations on them."""

from __future__ import annotations

from collections.abc import Iterable

Runs = list[tuple[int, int]]
"""Ranges of keys from `start` to `stop`, exclusive, in ascending order; neighbouring ranges never touch."""


def size(runs: Runs) -> int:
    """Number of keys."""
    return sum(stop - start for start, stop in runs)


def run(start: int, stop: int) -> Runs:
    """The run from `start` to `stop`, exclusive, or no run if that is empty."""
    return [(start, stop)] if start < stop else []


def of_keys(keys: Iterable[int]) -> Runs:
    """The runs of keys given in ascending order, each once or more."""
    return merged((key, key + 1) for key in keys)


def merged(pieces: Iterable[tuple[int, int]]) -> Runs:
    """The runs of pieces given in ascending order of their starts; they may touch and overlap."""
    runs: Runs = []
    for start, stop in pieces:
        if start >= stop:
            continue
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], stop)
        else:
            runs.append((start, stop))
    return runs


def unite(one: Runs, other: Runs) -> Runs:
    """The union of two sets of keys."""
    if not one or not other:
        return one or other
    return merged(sorted(one + other))


def intersect(one: Runs, other: Runs) -> Runs:
    """The intersection of two sets of keys."""
    found: Runs = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            found.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def complement(runs: Runs, keys: int) -> Runs:
    """The keys from 0 to `keys`, exclusive, that are not in the runs, none of which exceeds that range."""
    edges = [0, *(edge for run in runs for edge in run), keys]
    return [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2) if edges[i] < edges[i + 1]]
