"""How the work of a step is cut: tiles of rows of queries, and stretches of the keys that they see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attn_core import RaggedBatch

FEW = 16
"""Rows of a tile, heads of a group times tokens, where a request has no more."""
SHORTEST, LONGEST = 64, 256
"""Keys of a stretch, where a request does not remember very much."""
STRETCHES = 64
"""Stretches at most, of a request that remembers very much."""


class Item(NamedTuple):
    """Rows `first` to `first + rows` of a request, whose first token is `begin`, against keys `start` to `stop`.

    Row r is of token r // group and the head r % group of those that share keys. `slot` is where partial results go.
    """

    request: int
    begin: int
    first: int
    rows: int
    start: int
    stop: int
    slot: int


class MergeItem(NamedTuple):
    """Rows whose partial results lie in `slots` slots from `slot` on, each with one place for every key/value head."""

    begin: int
    first: int
    rows: int
    slot: int
    slots: int


class Asked(NamedTuple):
    """A request that computes `tokens` tokens, the first of which is token `begin` of the step, after `context` others.

    Of a `tree`, any token may see any other.
    """

    request: int
    begin: int
    tokens: int
    context: int
    tree: bool = False


class Work(NamedTuple):
    """What one kind of tile has to do."""

    tile: int
    items: list[Item]
    merges: list[MergeItem]
    slots: int


class Heads(NamedTuple):
    """Heads that share keys, key/value heads, rows of a tile where a request has more than a few, and how many `times`
    as long as usual stretches are."""

    group: int
    owners: int
    many: int
    times: int = 1


def asked_of(batch: RaggedBatch, requests: Iterable[int]) -> Iterator[Asked]:
    """These requests of a batch, as far as they compute anything."""
    wanted = set(requests)
    for span in batch.spans():
        if span.request in wanted and span.start < span.stop:
            yield Asked(span.request, span.start, span.stop - span.start, batch.contexts[span.request])


def works(asked: Iterable[Asked], heads: Heads, left: int | None) -> list[Work]:
    """The work of requests, queries of which see `left` places before themselves, None for all.

    How a request is cut depends on that request alone: it computes the same in any company.
    """
    found = {tile: Work(tile, [], [], 0) for tile in (FEW, heads.many)}
    for request, begin, tokens, context, tree in asked:
        rows = tokens * heads.group
        tile = FEW if rows <= FEW else heads.many
        work = found[tile]
        for first in range(0, rows, tile):
            count = min(tile, rows - first)
            oldest, stop = context, context + tokens
            if not tree:
                oldest, stop = context + first // heads.group, context + (first + count - 1) // heads.group + 1
            oldest = 0 if left is None else max(0, oldest - left)
            # Chunks that fill several tiles keep the chip busy, and would leave much to merge.
            whole = tokens > 1 and rows > heads.many
            cuts = [(oldest, stop)] if whole else list(stretches(oldest, stop, heads))
            slot = work.slots if len(cuts) > 1 else -1
            for place, (start, end) in enumerate(cuts):
                goes = slot if slot < 0 else slot + place * heads.owners
                work.items.append(Item(request, begin, first, count, start, end, goes))
            if slot >= 0:
                work.merges.append(MergeItem(begin, first, count, slot, len(cuts)))
                work = found[tile] = work._replace(slots=slot + len(cuts) * heads.owners)
    return [work for work in found.values() if work.items]


def stretches(start: int, stop: int, heads: Heads) -> Iterator[tuple[int, int]]:
    """Positions `start` to `stop` cut at multiples of a length that grows with their number."""
    length = heads.times * min(LONGEST, max(SHORTEST, 32 * (1 << (heads.owners - 1).bit_length())))
    while stop - start > length * STRETCHES:
        length *= 2
    for cut in range(start // length * length, stop, length):
        yield max(start, cut), min(stop, cut + length)
