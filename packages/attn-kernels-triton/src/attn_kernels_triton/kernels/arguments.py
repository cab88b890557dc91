"""The arguments of the attention kernels. A field that is None is a compile-time constant and costs nothing.

Kernels compare only fields with None, never whole tuples, which Triton 3.6 flattens before it compares them; an absent
tuple is represented by `NO_ROWS` and the like.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """A tensor [batch, row, head, size], its last axis contiguous: its address and its strides in elements."""

    data: Any
    batch: Any
    row: Any
    head: Any


NO_ROWS = Rows(None, None, None, None)


class Shape(NamedTuple):
    """The numbers of query heads, of query heads per key/value head, of queries and of keys."""

    heads: Any
    group: Any
    queries: Any
    keys: Any


class Rule(NamedTuple):
    """The parameters that turn query-key products into logits, and the bounds of the sliding window around a query.

    None means that there is no such bound or feature. `left` and `right` are how far before and after itself a query
    sees. `slopes` and `sinks` are [heads], float32. `bias` [heads, 2 far + 1], float32, is for distances key - query
    from -far to far; larger distances use the outermost bias.
    """

    scale: Any
    cap: Any = None
    slopes: Any = None
    sinks: Any = None
    left: Any = None
    right: Any = None
    bias: Any = None
    far: Any = None


class Places(NamedTuple):
    """Per-key and per-query masks (bytes) and positions (int32) with the strides of their batch axis; None if absent.

    `key_padding_mask` [batch, key] is zero where a key is padding; `query` and `key` are positions [batch, row];
    `pairs` [batch, head, query, key], with its strides of batch and head, is zero where a pair is not allowed.
    """

    key_padding_mask: Any = None
    keep_batch: Any = None
    query: Any = None
    query_batch: Any = None
    key: Any = None
    key_batch: Any = None
    pairs: Any = None
    pairs_batch: Any = None
    pairs_head: Any = None


class Blocks(NamedTuple):
    """The non-empty square blocks of a mask, of `size`, by block row: entries `starts[row]` to `starts[row + 1]`.

    `full` and `partial` hold the block columns, and `slots` the index into `bits` [slot, size, size / 32] of each
    partial block. For programs that own keys, rows and columns are exchanged, and full blocks are among the partial
    ones. If masks differ per head, `heads` is the number of block rows of a head and, for owners of keys,
    `group_heads` is the index of a block's query head among those that share the keys; else both are None. `map` [head
    or 1, row, column] is the slot of every block, 0 if it is full and -1 if it is empty; None for kernels that do not
    read it.
    """

    full_starts: Any
    full: Any
    partial_starts: Any
    partial: Any
    slots: Any
    bits: Any
    heads: Any
    group_heads: Any
    size: Any
    map: Any = None


NO_BLOCKS = Blocks(None, None, None, None, None, None, None, None, None)


class Tile(NamedTuple):
    """Compile-time constants of a kernel: queries and keys of a tile, the head sizes, and these rounded up to powers of
    two (`key_width`, `value_width`)."""

    queries: Any
    keys: Any
    key_size: Any
    value_size: Any
    key_width: Any
    value_width: Any


NO_TILE = Tile(None, None, None, None, None, None)


class Dropped(NamedTuple):
    """Attention dropout; both fields are None without dropout, see `attn_core.dropout.Dropout`.

    `state` [4], int64, holds the seed, the offset, the number of the first batch row, and the threshold of the random
    words. Weights that are kept are multiplied by `scale`.
    """

    state: Any
    scale: Any


NOTHING_DROPPED = Dropped(None, None)


class Forward(NamedTuple):
    """The argument of the forward kernels; `lse` [batch, heads, queries], float32, is the base-2 log-sum-exp.

    `texts` [tile, 7], int32, lists the tiles of packed texts, None if there are none: batch row, number of the tile
    within the text, first query of the text, its number of queries, first key, its number of keys, number of the text.
    `stages` is the number of key tiles in shared memory for the Gluon kernel, which does its own pipelining.
    """

    query: Rows
    key: Rows
    value: Rows
    out: Rows
    lse: Any
    shape: Shape
    rule: Rule
    places: Places
    blocks: Blocks
    tile: Tile
    texts: Any = None
    dropout: Dropped = NOTHING_DROPPED
    stages: Any = None


class Diagonals(NamedTuple):
    """The argument of the kernel that sums gradients of scores by distance.

    Square tiles whose first key is d tile sides after their first query form diagonal d; pairs at the same place in
    tiles of a diagonal have the same distance. There are `count` diagonals from `first` on. On those from `near` to
    `near_stop` biases differ per pair, and the sum at each place of the tiles is written to `sums` [slice, head,
    diagonal, side, side]. On any other diagonal all pairs share one bias, and their sum is written to `far` [slice,
    head, diagonal]. Both are float32. Slice s takes batch rows s, s + slices, and so on, of `number` rows; with packed
    texts, it takes such texts from the list `texts`.
    """

    first: Any
    count: Any
    near: Any
    near_stop: Any
    number: Any
    slices: Any
    sums: Any
    far: Any


NO_DIAGONALS = Diagonals(None, None, None, None, None, None, None, None)


class Padded(NamedTuple):
    """Values per query that the backward kernels with TMA read, float32, padded to `rows` of whole query tiles: `lse`
    [batch * head, row], +inf for queries that see nothing and for padding, and `delta` [batch * head, row]."""

    lse: Any
    delta: Any
    rows: Any


NOT_PADDED = Padded(None, None, None)


class Backward(NamedTuple):
    """The argument of the backward kernels; `out` is the gradient of the output, `lse` and `delta` are [batch, heads,
    queries], `first` and `second` the gradients that the kernel writes; `texts` as in `Forward`."""

    query: Rows
    key: Rows
    value: Rows
    out: Rows
    lse: Any
    delta: Any
    first: Rows | None
    second: Rows | None
    shape: Shape
    rule: Rule
    places: Places
    blocks: Blocks
    tile: Tile
    texts: Any = None
    dropout: Dropped = NOTHING_DROPPED
    diagonals: Diagonals = NO_DIAGONALS
    padded: Padded = NOT_PADDED
