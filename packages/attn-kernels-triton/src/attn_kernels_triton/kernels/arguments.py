"""What programs are given. A field that is None is known to be so when a program is compiled, and costs nothing.

Programs ask fields of tuples whether they are None, never tuples, which Triton 3.6 takes apart before it compares them;
where a tuple is absent, `NO_ROWS` and the like stand for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """A tensor [batch, row, head, size], its last axis dense: where it begins, and its strides in elements."""

    data: Any
    batch: Any
    row: Any
    head: Any


NO_ROWS = Rows(None, None, None, None)


class Shape(NamedTuple):
    """Numbers of query heads, of query heads a key/value head, of queries and of keys."""

    heads: Any
    group: Any
    queries: Any
    keys: Any


class Rule(NamedTuple):
    """How products become logits, and how far before and after itself a query sees; None is no bound or no such thing.

    `slopes` and `sinks` are [heads], float32. `bias` [heads, 2 far + 1], float32, is for distances key - query from
    -far to far, those beyond with that of the last.
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
    """What is said of each key and query, int32 and bytes, with the stride of the batch; None where nothing is.

    `key_padding_mask` [batch, key], zero where a key is padding; positions [batch, row]; `pairs` [batch, head, query,
    key], zero where a pair is not allowed, with its strides of batch and head.
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
    """Square blocks of `size` that are not empty, for each row of blocks: from `starts[row]` to `starts[row + 1]`.

    `full` and `partial` hold the columns, `slots` which of `bits` [slot, size, size / 32] belongs to a partial block.
    For programs that own keys, rows and columns are exchanged, and full blocks are among the partial ones. Where heads
    differ, `heads` is how many rows of blocks a head has, and for owners of keys `turns` which of the heads that share
    them a block belongs to; else both are None. `map` [head or 1, row, column] has the slot of every block, 0 where it
    is full, -1 where it is empty; None where nobody asks for it.
    """

    full_starts: Any
    full: Any
    partial_starts: Any
    partial: Any
    slots: Any
    bits: Any
    heads: Any
    turns: Any
    size: Any
    map: Any = None


NO_BLOCKS = Blocks(None, None, None, None, None, None, None, None, None)


class Tile(NamedTuple):
    """Constants of a program: how many queries and keys it takes at once, and the sizes of heads, as they are and as
    powers of two."""

    queries: Any
    keys: Any
    key_size: Any
    value_size: Any
    key_width: Any
    value_width: Any


NO_TILE = Tile(None, None, None, None, None, None)


class Dropped(NamedTuple):
    """`state` [4], int64: seed, offset, the number of the first row of a batch, and the threshold of words; see
    `attn_core.dropout.Dropout`. What is left is multiplied by `scale`. None where nothing is dropped.
    """

    state: Any
    scale: Any


NOTHING_DROPPED = Dropped(None, None)


class Forward(NamedTuple):
    """Everything for the forward program; `lse` [batch, heads, queries], float32, to the base 2.

    `texts` [tile, 7], int32, lists the tiles of packed texts, which are counted from each text's first row on: batch,
    number of the tile, first query of the text, its queries, first key, its keys, its number. None where nothing is
    packed. `stages` is how many tiles of keys are held at once by a program that is not told so by the compiler.
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
    """What the program is given that sums changes of scores by their distances.

    Square tiles whose first key stands a multiple of their side from their first query lie on the diagonal of that
    number; pairs at the same place of such tiles have the same distance. There are `count` diagonals from `first` on.
    On those from `near` to `near_stop` biases differ: what is summed at each place of a tile goes to `sums` [slice,
    head, diagonal, side, side]. On each other one all pairs share one, and their sum goes to `far` [slice, head,
    diagonal]. Both are float32. Slice s has the rows of a batch s, s + slices, and so on, or such texts: `number` in
    all, which are what `texts` lists where they are packed.
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
    """What dense backward programs read of each query, float32: `lse` [head of all batches, row], +inf for queries that
    see nothing and where there is none, and `delta`, of as many `rows` as whole tiles of queries have."""

    lse: Any
    delta: Any
    rows: Any


NOT_PADDED = Padded(None, None, None)


class Parts(NamedTuple):
    """Where programs of `joined` sum the gradient to queries: `sums` [part, head of all batches, row, key_width],
    float32, of `count` parts, a constant, and so many `heads`; rows as of `Padded`.

    `first` [2 or more], int32, is the first tile of keys of a launch, whose programs own one for each part, and how
    many query heads share a key/value head. `ragged` is None where all tiles of keys are whole.
    """

    sums: Any
    count: Any
    heads: Any
    first: Any
    ragged: Any


NO_PARTS = Parts(None, None, None, None, None)


class Backward(NamedTuple):
    """Everything for the backward programs; `out` is the gradient to the output, `lse` and `delta` [batch, heads,
    queries], `first` and `second` the gradients that the program writes; `texts` as of
    `Forward`."""

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
    parts: Parts = NO_PARTS
