"""Splitting an engine step over a paged KV cache into work items: tiles of query rows, splits of keys, draft trees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from attn_core import RaggedBatch
from attn_core.batch import RowsInPlace
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import PagedAttentionInputs
from torch import Tensor

from attn_kernels_triton.launch import integers
from attn_kernels_triton.paged.cascade import SharedPrefix, shared_prefixes
from attn_kernels_triton.paged.tiles import SMALL_TILE, Heads

SHORTEST, LONGEST = 64, 256
"""The bounds of the usual number of keys in a split (stretch)."""
MAX_SPLITS = 64
"""The largest number of splits of a request; longer contexts get longer splits."""


class Item(NamedTuple):
    """A work item: rows `first` to `first + rows` of a request, whose first token is `begin`, and keys `start` to
    `stop`.

    Row r belongs to token r // group and to head r % group of those that share keys. `slot` is where partial results
    are written, -1 if the item writes the output.
    """

    request: int
    begin: int
    first: int
    rows: int
    start: int
    stop: int
    slot: int


class MergeItem(NamedTuple):
    """Rows whose partial results are in `slots` slots from `slot` on, each with one place for every key/value head."""

    begin: int
    first: int
    rows: int
    slot: int
    slots: int


class RequestTokens(NamedTuple):
    """A request that computes `tokens` tokens after `context` cached ones; the first is token `begin` of the step.

    In a `tree`, any token may see any other. Keys before `since` belong to a prefix that is read once for many
    requests, and whose partial results are those of `shared` splits.
    """

    request: int
    begin: int
    tokens: int
    context: int
    tree: bool = False
    since: int = 0
    shared: int = 0


class Work(NamedTuple):
    """The work items and merges of tiles of `tile` rows, and the number of slots for partial results."""

    tile: int
    items: list[Item]
    merges: list[MergeItem]
    slots: int


def tokens_of(batch: RaggedBatch, requests: Iterable[int]) -> Iterator[RequestTokens]:
    """Those of the requests of a batch that compute any tokens."""
    wanted = set(requests)
    for span in batch.spans():
        if span.request in wanted and span.start < span.stop:
            yield RequestTokens(span.request, span.start, span.stop - span.start, batch.contexts[span.request])


def works(requests: Iterable[RequestTokens], heads: Heads, left: int | None) -> list[Work]:
    """The work of requests whose queries see `left` positions before themselves (None: all).

    The splits of a request depend on that request alone, so its results are batch-invariant, with two exceptions: if
    `heads.wanted` is set, splits of all requests are about equally long; and prefixes may be shared.
    """
    found = {tile: Work(tile, [], [], 0) for tile in (SMALL_TILE, heads.large_tile)}
    every = list(requests)
    even = even_length(every, heads, left)
    for request, begin, tokens, context, tree, since, shared in every:
        rows = tokens * heads.group
        tile = SMALL_TILE if rows <= SMALL_TILE else heads.large_tile
        work = found[tile]
        for first in range(0, rows, tile):
            count = min(tile, rows - first)
            oldest, stop = context, context + tokens
            if not tree:
                oldest, stop = context + first // heads.group, context + (first + count - 1) // heads.group + 1
            oldest = since if left is None else max(0, oldest - left)
            # Chunks that fill several tiles occupy the GPU without splits, which would leave much to merge.
            whole = tokens > 1 and rows > heads.large_tile
            if whole:
                key_splits = [(oldest, stop)]
            elif even:
                key_splits = list(even_splits(oldest, stop, even))
            else:
                key_splits = list(splits(oldest, stop, heads, tile // SMALL_TILE))
            parts = shared + len(key_splits)
            slot = work.slots if parts > 1 else -1
            for place, (start, end) in enumerate(key_splits, shared):
                item_slot = slot if slot < 0 else slot + place * heads.owners
                work.items.append(Item(request, begin, first, count, start, end, item_slot))
            if slot >= 0:
                work.merges.append(MergeItem(begin, first, count, slot, parts))
                work = found[tile] = work._replace(slots=slot + parts * heads.owners)
    return [work for work in found.values() if work.items]


EVEN = 128
"""The multiple to which the length of even splits is rounded up."""


def even_length(requests: Iterable[RequestTokens], heads: Heads, left: int | None) -> int:
    """The length of splits for `heads.wanted` splits of all requests together; 0 if that is not set."""
    if not heads.wanted:
        return 0
    keys = 0
    for one in requests:
        rows = one.tokens * heads.group
        held = one.context + one.tokens
        keys += -(-rows // (SMALL_TILE if rows <= SMALL_TILE else heads.large_tile)) * (
            held if left is None else min(held, left + 1)
        )
    return max(1, -(-keys // (heads.wanted * EVEN))) * EVEN


def even_splits(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    """Split positions `start` to `stop` into the nearest number of splits of a length, as `schedule_step` does."""
    held = stop - start
    pieces = max(1, (2 * held + length) // (2 * length))
    own = max(SMALL_TILE, -(-held // (pieces * SMALL_TILE)) * SMALL_TILE)
    for cut in range(start, stop, own):
        yield cut, min(stop, cut + own)


def splits(start: int, stop: int, heads: Heads, tiles: int) -> Iterator[tuple[int, int]]:
    """Split positions `start` to `stop` at multiples of a length, which grows with their number and with the partial
    results of a split, whose rows are `tiles` small tiles."""
    length = heads.times * tiles * min(LONGEST, max(SHORTEST, 32 * (1 << (heads.owners - 1).bit_length())))
    while stop - start > length * MAX_SPLITS:
        length *= 2
    for cut in range(start // length * length, stop, length):
        yield max(start, cut), min(stop, cut + length)


WORD = 32


class Node(NamedTuple):
    """A request that computes one token of a draft tree.

    `base` is the position of the tree's first token, `first` that of the request's first cached row. `rows` are the
    cache rows of the token's ancestors and its own, and `last` the row before the tree, -1 if there is none.
    """

    request: int
    base: int
    first: int
    last: int
    rows: tuple[int, ...]


class DraftTrees(NamedTuple):
    """Draft trees whose tokens are computed together.

    `numbers` [tree, place] are the cache rows from position `firsts[tree]` on; those of its tokens are last, from
    position `bases[tree]` on. Bit b of word w of `seen` [token of the step, words], int32, is set if a token sees token
    32 w + b of its tree.
    """

    trees: tuple[RequestTokens, ...]
    requests: frozenset[int]
    numbers: Tensor
    firsts: Tensor
    bases: Tensor
    seen: Tensor


def draft_trees_of(operands: PagedAttentionInputs) -> DraftTrees | None:
    """The trees of a step; None if there is no complete tree of at least two tokens, see `complete`, `same_before`."""
    batch, numbers = operands.batch, operands.rows.kv_indices
    trees = [tree for tree in trees_of(operands) if len(tree) > 1 and complete(tree)]
    trees = [tree for tree, same in zip(trees, same_before(trees, numbers), strict=True) if same]
    if not trees:
        return None
    longest = max(tree[0].base - tree[0].first + len(tree) for tree in trees)
    table = numbers.new_zeros(len(trees), longest)
    seen = torch.zeros(sum(batch.lengths), -(-max(map(len, trees)) // WORD), dtype=torch.int64)
    begins = [span.start for span in batch.spans()]
    for place, tree in enumerate(trees):
        before = tree[0].base - tree[0].first
        table[place, :before] = numbers[tree[0].request, :before]
        own = [node.rows[-1] for node in tree]
        table[place, before : before + len(tree)] = torch.tensor(own, device=numbers.device)
        order = {row: number for number, row in enumerate(own)}
        for node in tree:
            for number in (order[row] for row in node.rows):
                seen[begins[node.request], number // WORD] |= 1 << number % WORD
    seen = torch.where(seen >= 1 << 31, seen - (1 << 32), seen)
    return DraftTrees(
        trees=tuple(
            RequestTokens(place, begins[tree[0].request], len(tree), tree[0].base, tree=True)
            for place, tree in enumerate(trees)
        ),
        requests=frozenset(node.request for tree in trees for node in tree),
        numbers=table,
        firsts=integers([tree[0].first for tree in trees], numbers),
        bases=integers([tree[0].base for tree in trees], numbers),
        seen=seen.to(numbers.device, torch.int32),
    )


def trees_of(operands: PagedAttentionInputs) -> list[list[Node]]:
    """The requested tree tokens, grouped by tree: neighbouring requests with the same base, first position and row
    before the tree."""
    nodes = nodes_of(operands)
    found = []
    for _, some in groupby(enumerate(nodes), lambda pair: (pair[1].request - pair[0], *pair[1][1:4])):
        found.append([node for _, node in some])
    return found


def nodes_of(operands: PagedAttentionInputs) -> list[Node]:
    """The requests that compute one token of a tree, with their cache rows from the one before the tree on."""
    batch, rows = operands.batch, operands.rows
    found = [request for request in sorted(set(operands.requests)) if is_node(batch, request)]
    if not found:
        return []
    bases = [batch.contexts[request] + 1 - len(batch.path(request)) for request in found]
    depth = max(len(batch.path(request)) for request in found)
    starts = torch.tensor([base - rows.firsts[request] for request, base in zip(found, bases, strict=True)])
    places = (
        (starts[:, None] + torch.arange(-1, depth)).clamp(0, rows.kv_indices.shape[1] - 1).to(rows.kv_indices.device)
    )
    near = rows.kv_indices[torch.tensor(found, device=places.device)[:, None], places].tolist()
    return [
        Node(
            request,
            base,
            rows.firsts[request],
            line[0] if base > rows.firsts[request] else -1,
            tuple(line[1 : 1 + len(batch.path(request))]),
        )
        for request, base, line in zip(found, bases, near, strict=True)
    ]


def is_node(batch: RaggedBatch, request: int) -> bool:
    """Whether a request computes one token of a tree."""
    return bool(batch.path(request)) and batch.lengths[request] == 1


def complete(tree: list[Node]) -> bool:
    """Whether the ancestors of all tokens are in the tree, and each token has a cache row of its own."""
    own = {node.rows[-1] for node in tree}
    return len(own) == len(tree) and all(own.issuperset(node.rows) for node in tree)


def same_before(trees: list[list[Node]], numbers: Tensor) -> list[bool]:
    """For each tree, whether all its tokens have the same cache rows before the tree."""
    same = []
    for tree in trees:
        before = numbers[tree[0].request : tree[-1].request + 1, : tree[0].base - tree[0].first]
        same.append((before == before[:1]).all())
    return torch.stack(same).tolist() if same else []


class Tables(NamedTuple):
    """Cache rows `numbers` [request, place] from positions `firsts`, int32, on (from 0 if None), or the numbers of
    pages of `page` rows if that is given; for trees also `bases` and `seen`, see `DraftTrees`."""

    numbers: Tensor
    firsts: Tensor | None
    bases: Tensor | None = None
    seen: Tensor | None = None
    page: int | None = None


@dataclass(frozen=True, eq=False)
class Portion:
    """The `items` [item, 7] and `merges` [merge, 5], int32, for tiles of `tile` rows; see `kernels.paged.Paged`.

    `shared` are items over shared prefixes of the same queries, whose partial results go to the slots of this portion.
    """

    tile: int
    items: Tensor
    merges: Tensor
    slots: int
    tables: Tables
    shared: tuple[Shared, ...] = ()


@dataclass(frozen=True, eq=False)
class Shared:
    """Work over shared prefixes: `items` [item, 7], int32, of tiles of `tile` rows of several requests.

    `slots_of` [token], int32, are the slots of a token's first split; the slots of items are relative to them.
    """

    tile: int
    items: Tensor
    slots_of: Tensor


@dataclass(frozen=True, eq=False)
class Prepared:
    """The portions of a step, and the cache row numbers that they were computed from."""

    portions: tuple[Portion, ...]
    numbers: Tensor


Key = tuple[tuple[int, ...], Heads, int | None, int, int]

_PREPARED: WeakKeyDictionary[RaggedBatch, dict[Key, Prepared]] = WeakKeyDictionary()
"""The prepared work by batch, and by requests, heads, window, identity of the row numbers, and rows of the cache."""


def prepared(operands: PagedAttentionInputs, heads: Heads, left: int | None, rows: int) -> Prepared:
    """The work of a step over a cache of `rows` rows, computed once per batch; raises `InvalidValue` for row numbers
    outside of it."""
    known = _PREPARED.setdefault(operands.batch, {})
    numbers = operands.rows.kv_indices
    key = operands.requests, heads, left, id(numbers), rows
    if key not in known:
        check_numbers(operands.rows, operands.batch, rows)
        drafts = draft_trees_of(operands)
        firsts = integers(operands.rows.firsts, numbers)
        alone = set(operands.requests).difference(() if drafts is None else drafts.requests)
        prefixes = [] if left is not None else shared_prefixes(operands, alone, heads)
        own = works(apart_from(prefixes, tokens_of(operands.batch, alone), heads), heads, left)
        portions = with_shared(portions_of(own, Tables(numbers, firsts)), own, prefixes, heads)
        if drafts is not None:
            tables = Tables(drafts.numbers, drafts.firsts, drafts.bases, drafts.seen)
            portions += portions_of(works(drafts.trees, heads, left), tables)
        # A reference to the row numbers is kept, so that their `id` is not reused.
        known[key] = Prepared(tuple(portions), numbers)
    return known[key]


def apart_from(
    prefixes: Iterable[SharedPrefix], requests: Iterable[RequestTokens], heads: Heads
) -> Iterator[RequestTokens]:
    """The requests without the keys of their shared prefixes."""
    prefix_of: dict[int, tuple[int, int]] = {}
    for prefix in prefixes:
        count = len(list(splits(0, prefix.keys, heads, 1)))
        prefix_of |= dict.fromkeys(prefix.members, (prefix.keys, count))
    for one in requests:
        since, shared = prefix_of.get(one.request, (0, 0))
        yield one._replace(since=since, shared=shared)


def with_shared(
    portions: list[Portion], own: Sequence[Work], prefixes: Sequence[SharedPrefix], heads: Heads
) -> list[Portion]:
    """The portions, with the work over shared prefixes added to that of the small tile, where each request has its own
    tile."""
    if not prefixes:
        return portions
    items: dict[int, list[Item]] = {}
    for prefix in prefixes:
        rows = prefix.requests * heads.group
        tile = SMALL_TILE if rows <= SMALL_TILE else heads.large_tile
        for first in range(0, rows, tile):
            for place, cut in enumerate(splits(0, prefix.keys, heads, 1)):
                count = min(tile, rows - first)
                item = Item(prefix.request, prefix.begin, first, count, *cut, place * heads.owners)
                items.setdefault(tile, []).append(item)
    small = next(number for number, work in enumerate(own) if work.tile == SMALL_TILE)
    slots = {merge.begin: merge.slot for merge in own[small].merges}
    numbers = portions[small].tables.numbers
    slots_of = integers([slots.get(token, 0) for token in range(max(slots) + 1)], numbers)
    shared = tuple(Shared(tile, integers(some, numbers), slots_of) for tile, some in items.items())
    return [replace(one, shared=shared) if number == small else one for number, one in enumerate(portions)]


def portions_of(found: list[Work], tables: Tables) -> list[Portion]:
    """The work as tensors that the kernels read."""
    return [
        Portion(
            work.tile,
            integers(work.items, tables.numbers),
            integers(work.merges, tables.numbers).view(-1, 5),
            work.slots,
            tables,
        )
        for work in found
    ]


def check_numbers(rows: RowsInPlace, batch: RaggedBatch, count: int) -> None:
    """Raise `InvalidValue` unless all row numbers of each request are within a cache of `count` rows."""
    held = [past + new - first for past, new, first in zip(batch.contexts, batch.lengths, rows.firsts, strict=True)]
    longest = max(held, default=0)
    if rows.kv_indices.shape[1] < longest:
        raise InvalidValue.of(
            "rows.kv_indices", list(rows.kv_indices.shape), f"at least {longest} row numbers per request"
        )
    if not longest:
        return
    real = (
        torch.arange(longest, device=rows.kv_indices.device)
        < torch.tensor(held, device=rows.kv_indices.device)[:, None]
    )
    numbers = rows.kv_indices[:, :longest]
    outside = real & ((numbers < 0) | (numbers >= count))
    if bool(outside.any()):
        request, place = outside.nonzero()[0].tolist()
        allowed = f"rows from 0 to {count - 1}, the last row of the cache"
        raise InvalidValue.of(f"rows.kv_indices[{request}, {place}]", int(numbers[request, place]), allowed)
