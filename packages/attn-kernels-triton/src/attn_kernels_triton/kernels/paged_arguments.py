"""What the programs over pages are given; see `arguments`."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_kernels_triton.kernels.arguments import Rows, Rule


class Memory(NamedTuple):
    """Rows [row, head, size] of all requests, and their strides.

    Codes where `step` [row, head] or [row, head, group] is given, four bits each where `low`, as `step`, is given too.
    """

    data: Any
    row: Any
    head: Any
    step: Any = None
    step_row: Any = None
    step_head: Any = None
    low: Any = None


NO_MEMORY = Memory(None, None, None)


class PagedTile(NamedTuple):
    """Constants: how many rows of queries and how many keys are taken at once, sizes, and these as powers of two.

    `rest_size` is that of the second part of keys that lie in two parts, else 0.
    """

    rows: Any
    keys: Any
    key_size: Any
    value_size: Any
    rest_size: Any
    key_width: Any
    value_width: Any
    rest_width: Any


class Paged(NamedTuple):
    """Everything for the program that meets rows in pages.

    `query` and `out` [1, token, head, size]. `value` is `NO_MEMORY` where values are the first part of keys, `rest`
    where keys have no second part. `numbers` [request, place] are rows in memory from position `firsts[request]` on,
    `stride` its stride. `items` [item, 7] are, see `paged.items`: request, first token, first row, rows, first key,
    last key (exclusive), and where partial results go, -1 to the output. `sums` [slot, rows, value_width] and `lse`
    [slot, rows], float32, to the base 2, hold partial results. Of trees, whose tokens lie from position
    `bases[request]` on, `seen` [token, words], int32, has a bit for each token of its tree that a token sees; else both
    are None.
    """

    query: Rows
    key: Memory
    rest: Memory
    value: Memory
    out: Rows
    numbers: Any
    stride: Any
    firsts: Any
    bases: Any
    seen: Any
    words: Any
    positions: Any
    items: Any
    sums: Any
    lse: Any
    heads: Any
    group: Any
    rule: Rule
    tile: PagedTile


class Merge(NamedTuple):
    """Everything for the program that merges; `merges` [merge, 5] are first token, first row, rows, slot, slots."""

    out: Rows
    merges: Any
    sums: Any
    lse: Any
    heads: Any
    group: Any
    rule: Rule
    tile: PagedTile
