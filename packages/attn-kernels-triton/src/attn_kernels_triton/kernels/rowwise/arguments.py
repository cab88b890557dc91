"""What the programs on rows are given; absent tensors are `NO_MATRIX`, as Triton 3.6 asks."""

from __future__ import annotations

from typing import Any, NamedTuple


class Matrix(NamedTuple):
    """A tensor [row, size], its last axis dense: where it begins, and its stride in elements."""

    data: Any
    row: Any


NO_MATRIX = Matrix(None, None)


class RowTile(NamedTuple):
    """Constants: rows taken at once, their size, and how many elements of it are taken at once, a power of two."""

    rows: Any
    size: Any
    width: Any


class Norm(NamedTuple):
    """Everything for the forward program of a norm; `total` is where the sum of `rows` and `added` goes."""

    rows: Matrix
    added: Matrix
    total: Matrix
    gain: Any
    out: Matrix
    count: Any
    eps: Any
    tile: RowTile


class Unnorm(NamedTuple):
    """Everything for the backward program of a norm: of `rows`, the gradients `out` to what was normed and `total` to
    the rows themselves; written are `change`, to the rows, and `gains` [programs, size], float32, parts of that to the
    gain, `NO_MATRIX` where there is none."""

    rows: Matrix
    gain: Any
    out: Matrix
    total: Matrix
    change: Matrix
    gains: Matrix
    count: Any
    programs: Any
    eps: Any
    tile: RowTile


class Gate(NamedTuple):
    """Everything for the programs of a gate; `change` is the gradient to the output, `first` to gates, `second` to what
    they let through, of the backward program alone. `activation` is a constant."""

    gate: Matrix
    up: Matrix
    out: Matrix
    change: Matrix
    first: Matrix
    second: Matrix
    count: Any
    activation: Any
    tile: RowTile


class Turn(NamedTuple):
    """Cosines and sines [batch, token, turned]: where they begin, strides of batch and token."""

    cosines: Any
    sines: Any
    batch: Any
    row: Any


class TurnTile(NamedTuple):
    """Constants: tokens and heads of a program; size of a head, pairs of it that turn and the power of two that holds
    them, that which holds the rest, 0 if there is none; whether neighbours are pairs, and whether they turn back."""

    tokens: Any
    heads: Any
    size: Any
    pairs: Any
    width: Any
    rest: Any
    interleaved: Any
    back: Any


class Rotate(NamedTuple):
    """Everything for the program that turns `rows` [batch, token, head, size] into `out`, both `arguments.Rows`."""

    rows: Any
    out: Any
    turn: Turn
    tokens: Any
    heads: Any
    tile: TurnTile


class Losses(NamedTuple):
    """Everything for the program of cross-entropy: `logits` [row, vocabulary], which it overwrites where the constant
    `gradients` says so, `ids` [row], int64, and `losses` [row], float32; `smoothing` is a constant, for 0 costs
    nothing, and so is `cap`, None for none."""

    logits: Matrix
    ids: Any
    losses: Any
    ignored: Any
    smoothing: Any
    cap: Any
    gradients: Any
    tile: RowTile
