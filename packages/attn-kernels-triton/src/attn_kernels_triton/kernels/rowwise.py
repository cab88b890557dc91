"""Kernels that compute each row on its own: RMSNorm, rotary embedding, gated activations, cross-entropy."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.common import start_of


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


@triton.jit
def starts_of(view, rows):
    """The addresses of rows, in 64 bits: a matrix may have more elements than 32 bits count.

    Rows of one element lie one apart, which is a constant, and which Triton 3.6 knows as None inside of a loop.
    """
    places = rows.to(tl.int64)
    if view.row is not None:
        places = places * view.row
    return view.data + places


@triton.jit
def read_tile(view, rows, count, columns, size: tl.constexpr):
    """Elements [rows, columns] in float32, zeros outside of the matrix."""
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    return tl.load(starts_of(view, rows)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def write_tile(view, rows, count, columns, size: tl.constexpr, content):
    """Write elements [rows, columns] as far as they exist, in the type of the matrix."""
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    at = starts_of(view, rows)[:, None] + columns[None, :]
    tl.store(at, content.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def norm_rows(call):
    """Norm some rows. Grid: blocks of rows."""
    rows = tl.program_id(0) * call.tile.rows + tl.arange(0, call.tile.rows)
    columns = tl.arange(0, call.tile.width)
    row = read_tile(call.rows, rows, call.count, columns, call.tile.size)
    if call.added.data is not None:
        row += read_tile(call.added, rows, call.count, columns, call.tile.size)
        # What is normed is what others read: the sum as it was rounded.
        row = row.to(call.total.data.dtype.element_ty)
        write_tile(call.total, rows, call.count, columns, call.tile.size, row)
        row = row.to(tl.float32)
    out = row * tl.rsqrt(tl.sum(row * row, 1) / call.tile.size + call.eps)[:, None]
    if call.gain is not None:
        out *= gain_of(call.gain, columns, call.tile.size)[None, :]
    write_tile(call.out, rows, call.count, columns, call.tile.size, out)


@triton.jit
def unnorm_rows(call):
    """Gradients to rows, and what these rows add to that to the gain. Grid: programs, which share the blocks of rows.

    With x̂ = x / rms(x) and h = g ⊙ dy:   dx = (h - x̂ mean(h x̂)) / rms(x),   dg = Σ dy ⊙ x̂
    """
    columns = tl.arange(0, call.tile.width)
    gains = tl.zeros([call.tile.width], tl.float32)
    count, programs, eps = call.count + 0, call.programs + 0, call.eps
    for block in range(tl.program_id(0), tl.cdiv(count, call.tile.rows), programs):
        rows = block * call.tile.rows + tl.arange(0, call.tile.rows)
        row = read_tile(call.rows, rows, count, columns, call.tile.size)
        change = read_tile(call.out, rows, count, columns, call.tile.size)
        scale = tl.rsqrt(tl.sum(row * row, 1) / call.tile.size + eps)[:, None]
        row *= scale
        if call.gain is not None:
            gains += tl.sum(change * row, 0)
            change *= gain_of(call.gain, columns, call.tile.size)[None, :]
        change = scale * (change - row * (tl.sum(change * row, 1) / call.tile.size)[:, None])
        if call.total.data is not None:
            change += read_tile(call.total, rows, count, columns, call.tile.size)
        write_tile(call.change, rows, count, columns, call.tile.size, change)
    if call.gains.data is not None:
        at = call.gains.data + tl.program_id(0) * call.tile.size + columns
        tl.store(at, gains, mask=columns < call.tile.size)


@triton.jit
def gain_of(gain, columns, size: tl.constexpr):
    """The gain of some columns in float32."""
    return tl.load(gain + columns, mask=columns < size, other=0.0).to(tl.float32)


@triton.jit
def rotate_rows(call):
    """Turn some tokens of some heads. Grid: groups of heads of blocks of tokens of sequences."""
    groups = tl.cdiv(call.heads, call.tile.heads)
    blocks = tl.cdiv(call.tokens, call.tile.tokens)
    place = tl.program_id(0) // groups
    batch, first = place // blocks, tl.program_id(0) % groups * call.tile.heads
    tokens = place % blocks * call.tile.tokens + tl.arange(0, call.tile.tokens)
    pairs = tl.arange(0, call.tile.width)
    cosines, sines = cos_sin_of_batch(call, batch, tokens, pairs)
    for number in tl.static_range(call.tile.heads):
        head = first + number
        real = (tokens < tl.where(head < call.heads, call.tokens, 0))[:, None]
        source = start_of(call.rows, batch, head) + tokens.to(tl.int64)[:, None] * call.rows.row
        target = start_of(call.out, batch, head) + tokens.to(tl.int64)[:, None] * call.out.row
        if call.tile.interleaved:
            turn_neighbours(source, target, cosines, sines, real, call.tile)
        else:
            turn_halves(source, target, cosines, sines, real, call.tile)
        if call.tile.rest > 0:
            across = 2 * call.tile.pairs + tl.arange(0, call.tile.rest)[None, :]
            inside = real & (across < call.tile.size)
            tl.store(target + across, tl.load(source + across, mask=inside), mask=inside)


@triton.jit
def cos_sin_of_batch(call, batch, tokens, pairs):
    """Cosines and sines [tokens, pairs] of the angles; the sine that is kept of a pair's second element is positive."""
    at = tl.cast(batch, tl.int64) * call.turn.batch + tokens.to(tl.int64)[:, None] * call.turn.row
    if call.tile.interleaved:
        real = (tokens < call.tokens)[:, None]
        cosines, _ = read_neighbours(call.turn.cosines + at, real, call.tile)
        _, sines = read_neighbours(call.turn.sines + at, real, call.tile)
    else:
        known = (tokens < call.tokens)[:, None] & (pairs < call.tile.pairs)[None, :]
        cosines = tl.load(call.turn.cosines + at + pairs[None, :], mask=known, other=0.0)
        sines = tl.load(call.turn.sines + at + call.tile.pairs + pairs[None, :], mask=known, other=0.0)
    return cosines, -sines if call.tile.back else sines


@triton.jit
def turn_halves(source, target, cosines, sines, real, tile):
    """Elements p and p + half of each row."""
    near = tl.arange(0, tile.width)[None, :]
    inside = real & (near < tile.pairs)
    x = tl.load(source + near, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + tile.pairs + near, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + near, (x * cosines - y * sines).to(target.dtype.element_ty), mask=inside)
    tl.store(target + tile.pairs + near, (y * cosines + x * sines).to(target.dtype.element_ty), mask=inside)


@triton.jit
def turn_neighbours(source, target, cosines, sines, real, tile):
    """Elements 2p and 2p + 1 of each row."""
    x, y = read_neighbours(source, real, tile)
    turned = tl.reshape(tl.join(x * cosines - y * sines, y * cosines + x * sines), [tile.tokens, 2 * tile.width])
    across = tl.arange(0, 2 * tile.width)[None, :]
    inside = real & (across < 2 * tile.pairs)
    tl.store(target + across, turned.to(target.dtype.element_ty), mask=inside)


@triton.jit
def read_neighbours(source, real, tile):
    """Elements 2p and elements 2p + 1 in float32, read side by side."""
    across = tl.arange(0, 2 * tile.width)[None, :]
    both = tl.load(source + across, mask=real & (across < 2 * tile.pairs), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, [tile.tokens, tile.width, 2]))


SQRT_HALF = tl.constexpr(0.7071067811865476)
NORMAL = tl.constexpr(0.3989422804014327)
"""1 / √(2π), the height of the normal density."""
STEEP, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""Of (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, written as a logistic function of twice the argument."""


@triton.jit
def gate_rows(call):
    """Write the output. Grid: parts of rows of blocks of rows."""
    rows, columns = place_of(call)
    gate = read_tile(call.gate, rows, call.count, columns, call.tile.size)
    up = read_tile(call.up, rows, call.count, columns, call.tile.size)
    share, _ = share_of(gate, call.activation)
    write_tile(call.out, rows, call.count, columns, call.tile.size, gate * share * up)


@triton.jit
def ungate_rows(call):
    """Write the gradients. Grid: parts of rows of blocks of rows."""
    rows, columns = place_of(call)
    gate = read_tile(call.gate, rows, call.count, columns, call.tile.size)
    up = read_tile(call.up, rows, call.count, columns, call.tile.size)
    change = read_tile(call.change, rows, call.count, columns, call.tile.size)
    share, slope = share_of(gate, call.activation)
    write_tile(call.first, rows, call.count, columns, call.tile.size, change * up * (share + gate * slope))
    write_tile(call.second, rows, call.count, columns, call.tile.size, change * gate * share)


@triton.jit
def place_of(call):
    """Rows and columns of this program."""
    parts: tl.constexpr = (call.tile.size + call.tile.width - 1) // call.tile.width
    rows = tl.program_id(0) // parts * call.tile.rows + tl.arange(0, call.tile.rows)
    return rows, tl.program_id(0) % parts * call.tile.width + tl.arange(0, call.tile.width)


@triton.jit
def share_of(gate, activation: tl.constexpr):
    """s(x) of an activation x s(x), and s'(x)."""
    if activation == "gelu":
        share = 0.5 * (1 + tl.erf(gate * SQRT_HALF))
        slope = tl.exp(gate * gate * -0.5) * NORMAL
    else:
        at, steep = gate, 1.0
        if activation == "gelu_tanh":
            at = (gate + gate * gate * gate * CUBIC) * STEEP
            steep = (1 + gate * gate * CUBIC * 3) * STEEP
        share = tl.sigmoid(at)
        # As σ(-x): where σ(x) is nearly 1, one minus it has few digits.
        slope = share * tl.sigmoid(-at) * steep
    return share, slope


@triton.jit
def judge_rows(call):
    """The loss of a row z of V logits and an id t, and dloss / dz; s is the smoothing. Grid: rows.

    loss = ln Σ e^z - (1 - s) z_t - s mean(z),   dloss / dz = softmax(z) - (1 - s) [t] - s / V
    """
    start = starts_of(call.logits, tl.program_id(0))
    chosen = tl.load(call.ids + tl.program_id(0))
    counts = chosen != call.ignored
    known = (chosen >= 0) & (chosen < call.tile.size)
    said = capped(tl.load(start + chosen, mask=known & counts, other=0.0).to(tl.float32), call.cap)
    most, total, mean = sums_of(call, start)
    # Differences of logits first: large ones would swallow the logarithm.
    whole = tl.log(total)
    loss = whole + (1 - call.smoothing) * (most - said)
    if call.smoothing > 0:
        loss += call.smoothing * (most - mean)
    loss = tl.where(known, loss, float("nan"))
    tl.store(call.losses + tl.program_id(0), tl.where(counts, loss, 0.0))
    if call.gradients:
        # Every thread has read the logit of the id before any overwrites it.
        tl.debug_barrier()
        for first in range(0, call.tile.size, call.tile.width):
            columns = first + tl.arange(0, call.tile.width)
            inside = columns < call.tile.size
            logits = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
            bounded = capped(logits, call.cap)
            change = tl.exp(bounded - most - whole) - call.smoothing / call.tile.size
            change -= tl.where(columns == chosen, 1 - call.smoothing, 0.0)
            if call.cap is not None:
                change *= 1 - (bounded / call.cap) * (bounded / call.cap)
            change = tl.where(counts, tl.where(known, change, float("nan")), 0.0)
            tl.store(start + columns, change.to(call.logits.data.dtype.element_ty), mask=inside)


@triton.jit
def sums_of(call, start):
    """The largest logit m, Σ e^(z - m), and the mean of z where it is asked for."""
    most, total, sum_of_all = float("-inf"), 0.0, 0.0
    for first in range(0, call.tile.size, call.tile.width):
        columns = first + tl.arange(0, call.tile.width)
        inside = columns < call.tile.size
        logits = capped(tl.load(start + columns, mask=inside, other=float("-inf")).to(tl.float32), call.cap)
        logits = tl.where(inside, logits, float("-inf"))
        larger = tl.maximum(most, tl.max(logits, 0))
        # Where all logits so far are -inf, nothing may be taken off them.
        known = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(most - known) + tl.sum(tl.exp(logits - known), 0)
        most = larger
        if call.smoothing > 0:
            sum_of_all += tl.sum(tl.where(inside, logits, 0.0), 0)
    return most, total, sum_of_all / call.tile.size


@triton.jit
def capped(logits, cap):
    """cap · tanh(logits / cap), or the logits; tanh by way of e^-2|x|, which cannot overflow."""
    if cap is not None:
        small = tl.exp(-2 * tl.abs(logits / cap))
        size = cap * (1 - small) / (1 + small)
        logits = tl.where(logits < 0, -size, size)
    return logits
