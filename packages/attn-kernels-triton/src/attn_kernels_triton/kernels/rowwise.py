"""Kernels that compute each row on its own: RMSNorm, rotary embedding, gated activations, cross-entropy."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.common import start_of


class Matrix(NamedTuple):
    """A tensor [row, size], its last axis contiguous: its address and its row stride in elements."""

    data: Any
    row: Any


NO_MATRIX = Matrix(None, None)


class RowTile(NamedTuple):
    """Compile-time constants: rows of a tile, the size of a row, and the elements of a row in a tile, a power of
    two."""

    rows: Any
    size: Any
    width: Any


class Norm(NamedTuple):
    """The argument of the forward kernel of RMSNorm; the sum of `rows` and `added` is written to `total`."""

    rows: Matrix
    added: Matrix
    total: Matrix
    gain: Any
    out: Matrix
    count: Any
    eps: Any
    tile: RowTile


class Unnorm(NamedTuple):
    """The argument of the backward kernel of RMSNorm: the normalized `rows` and the gradients `out` of the result and
    `total` of the sum. It writes `change`, the gradient of the rows, and `gains` [programs, size], float32, partial
    sums of that of the gain; `NO_MATRIX` if it needs none."""

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
    """The argument of the kernels of a gated activation; for the backward kernel, `change` is the gradient of the
    output, `first` that of `gate` and `second` that of `up`. `activation` is a constant."""

    gate: Matrix
    up: Matrix
    out: Matrix
    change: Matrix
    first: Matrix
    second: Matrix
    count: Any
    activation: Any
    tile: RowTile


class Angles(NamedTuple):
    """Cosines and sines [batch, token, rotary size]: their addresses and their strides of batch and token."""

    cosines: Any
    sines: Any
    batch: Any
    row: Any


class RotaryTile(NamedTuple):
    """Compile-time constants: tokens and heads of a program; the size of a head; the number of rotated pairs and the
    power of two that holds them (`width`); the power of two that holds the elements that are not rotated (`rest`, 0 if
    there are none); whether pairs are `interleaved`, and whether the rotation is inverted (`back`)."""

    tokens: Any
    heads: Any
    size: Any
    pairs: Any
    width: Any
    rest: Any
    interleaved: Any
    back: Any


class Rotate(NamedTuple):
    """The argument of the kernel that rotates `rows` [batch, token, head, size] into `out`, both `arguments.Rows`."""

    rows: Any
    out: Any
    angles: Angles
    tokens: Any
    heads: Any
    tile: RotaryTile


class Losses(NamedTuple):
    """The argument of the cross-entropy kernel: `logits` [row, vocabulary], which are overwritten with their gradients
    if the constant `gradients` is set, `ids` [row], int64, and `losses` [row], float32. `smoothing` is a constant, so
    that 0 costs nothing, and so is the soft cap `cap`, None for none."""

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
    """The addresses of rows, with 64-bit offsets, because a matrix may be large.

    A row stride of 1 (rows of one element) is a constant, which Triton 3.6 turns into None inside loops.
    """
    places = rows.to(tl.int64)
    if view.row is not None:
        places = places * view.row
    return view.data + places


@triton.jit
def read_tile(view, rows, count, columns, size: tl.constexpr):
    """Load elements [rows, columns] in float32, with zeros outside of the matrix."""
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    return tl.load(starts_of(view, rows)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def write_tile(view, rows, count, columns, size: tl.constexpr, content):
    """Store the elements [rows, columns] that exist, in the dtype of the matrix."""
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    at = starts_of(view, rows)[:, None] + columns[None, :]
    tl.store(at, content.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def norm_rows(call):
    """RMSNorm of a block of rows, after adding `added` if it is given. Grid: blocks of rows."""
    rows = tl.program_id(0) * call.tile.rows + tl.arange(0, call.tile.rows)
    columns = tl.arange(0, call.tile.width)
    row = read_tile(call.rows, rows, call.count, columns, call.tile.size)
    if call.added.data is not None:
        row += read_tile(call.added, rows, call.count, columns, call.tile.size)
        # Normalize the sum as it is stored, that is, after rounding.
        row = row.to(call.total.data.dtype.element_ty)
        write_tile(call.total, rows, call.count, columns, call.tile.size, row)
        row = row.to(tl.float32)
    out = row * tl.rsqrt(tl.sum(row * row, 1) / call.tile.size + call.eps)[:, None]
    if call.gain is not None:
        out *= gain_of(call.gain, columns, call.tile.size)[None, :]
    write_tile(call.out, rows, call.count, columns, call.tile.size, out)


@triton.jit
def unnorm_rows(call):
    """The gradients of rows, and their part of the gradient of the gain. Grid: programs, which share all blocks of
    rows.

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
    """Load the gain of some columns in float32."""
    return tl.load(gain + columns, mask=columns < size, other=0.0).to(tl.float32)


@triton.jit
def rotate_rows(call):
    """Rotate a block of tokens of a group of heads. Grid: groups of heads, for each block of tokens, for each batch
    row."""
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
            rotate_neighbours(source, target, cosines, sines, real, call.tile)
        else:
            rotate_halves(source, target, cosines, sines, real, call.tile)
        if call.tile.rest > 0:
            across = 2 * call.tile.pairs + tl.arange(0, call.tile.rest)[None, :]
            inside = real & (across < call.tile.size)
            tl.store(target + across, tl.load(source + across, mask=inside), mask=inside)


@triton.jit
def cos_sin_of_batch(call, batch, tokens, pairs):
    """Load cosines and sines [tokens, pairs] of the angles; the table's sine of a pair's second element is positive."""
    at = tl.cast(batch, tl.int64) * call.angles.batch + tokens.to(tl.int64)[:, None] * call.angles.row
    if call.tile.interleaved:
        real = (tokens < call.tokens)[:, None]
        cosines, _ = read_neighbours(call.angles.cosines + at, real, call.tile)
        _, sines = read_neighbours(call.angles.sines + at, real, call.tile)
    else:
        known = (tokens < call.tokens)[:, None] & (pairs < call.tile.pairs)[None, :]
        cosines = tl.load(call.angles.cosines + at + pairs[None, :], mask=known, other=0.0)
        sines = tl.load(call.angles.sines + at + call.tile.pairs + pairs[None, :], mask=known, other=0.0)
    return cosines, -sines if call.tile.back else sines


@triton.jit
def rotate_halves(source, target, cosines, sines, real, tile):
    """Rotate the pairs of elements p and p + half of each row."""
    near = tl.arange(0, tile.width)[None, :]
    inside = real & (near < tile.pairs)
    x = tl.load(source + near, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + tile.pairs + near, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + near, (x * cosines - y * sines).to(target.dtype.element_ty), mask=inside)
    tl.store(target + tile.pairs + near, (y * cosines + x * sines).to(target.dtype.element_ty), mask=inside)


@triton.jit
def rotate_neighbours(source, target, cosines, sines, real, tile):
    """Rotate the pairs of elements 2p and 2p + 1 of each row."""
    x, y = read_neighbours(source, real, tile)
    rotated = tl.reshape(tl.join(x * cosines - y * sines, y * cosines + x * sines), [tile.tokens, 2 * tile.width])
    across = tl.arange(0, 2 * tile.width)[None, :]
    inside = real & (across < 2 * tile.pairs)
    tl.store(target + across, rotated.to(target.dtype.element_ty), mask=inside)


@triton.jit
def read_neighbours(source, real, tile):
    """Load elements 2p and elements 2p + 1 in float32, by one contiguous load."""
    across = tl.arange(0, 2 * tile.width)[None, :]
    both = tl.load(source + across, mask=real & (across < 2 * tile.pairs), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, [tile.tokens, tile.width, 2]))


SQRT_HALF = tl.constexpr(0.7071067811865476)
NORMAL = tl.constexpr(0.3989422804014327)
"""1 / √(2π), the maximum of the normal density."""
STEEP, CUBIC = tl.constexpr(1.5957691216057308), tl.constexpr(0.044715)
"""Coefficients of (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, written as a logistic function of twice the argument."""


@triton.jit
def gate_rows(call):
    """The forward pass of a gated activation. Grid: parts of rows, for each block of rows."""
    rows, columns = place_of(call)
    gate = read_tile(call.gate, rows, call.count, columns, call.tile.size)
    up = read_tile(call.up, rows, call.count, columns, call.tile.size)
    factor, _ = factor_of(gate, call.activation)
    write_tile(call.out, rows, call.count, columns, call.tile.size, gate * factor * up)


@triton.jit
def ungate_rows(call):
    """The gradients of a gated activation. Grid: parts of rows, for each block of rows."""
    rows, columns = place_of(call)
    gate = read_tile(call.gate, rows, call.count, columns, call.tile.size)
    up = read_tile(call.up, rows, call.count, columns, call.tile.size)
    change = read_tile(call.change, rows, call.count, columns, call.tile.size)
    factor, slope = factor_of(gate, call.activation)
    write_tile(call.first, rows, call.count, columns, call.tile.size, change * up * (factor + gate * slope))
    write_tile(call.second, rows, call.count, columns, call.tile.size, change * gate * factor)


@triton.jit
def place_of(call):
    """The rows and columns of this program."""
    parts: tl.constexpr = (call.tile.size + call.tile.width - 1) // call.tile.width
    rows = tl.program_id(0) // parts * call.tile.rows + tl.arange(0, call.tile.rows)
    return rows, tl.program_id(0) % parts * call.tile.width + tl.arange(0, call.tile.width)


@triton.jit
def factor_of(gate, activation: tl.constexpr):
    """The factor s(x) of an activation x s(x), and its derivative s'(x)."""
    if activation == "gelu":
        factor = 0.5 * (1 + tl.erf(gate * SQRT_HALF))
        slope = tl.exp(gate * gate * -0.5) * NORMAL
    else:
        at, steep = gate, 1.0
        if activation == "gelu_tanh":
            at = (gate + gate * gate * gate * CUBIC) * STEEP
            steep = (1 + gate * gate * CUBIC * 3) * STEEP
        factor = tl.sigmoid(at)
        # 1 - σ(x) is computed as σ(-x), which avoids cancellation where σ(x) is nearly 1.
        slope = factor * tl.sigmoid(-at) * steep
    return factor, slope


@triton.jit
def judge_rows(call):
    """The cross-entropy of a row z of V logits and an id t, and dloss / dz; s is the label smoothing. Grid: rows.

    loss = ln Σ e^z - (1 - s) z_t - s mean(z),   dloss / dz = softmax(z) - (1 - s) [t] - s / V
    """
    start = starts_of(call.logits, tl.program_id(0))
    chosen = tl.load(call.ids + tl.program_id(0))
    counts = chosen != call.ignored
    known = (chosen >= 0) & (chosen < call.tile.size)
    chosen_logit = capped(tl.load(start + chosen, mask=known & counts, other=0.0).to(tl.float32), call.cap)
    most, total, mean = sums_of(call, start)
    # Differences of logits are taken first: added to a large logit, the logarithm would be rounded away.
    whole = tl.log(total)
    loss = whole + (1 - call.smoothing) * (most - chosen_logit)
    if call.smoothing > 0:
        loss += call.smoothing * (most - mean)
    loss = tl.where(known, loss, float("nan"))
    tl.store(call.losses + tl.program_id(0), tl.where(counts, loss, 0.0))
    if call.gradients:
        # All threads must have read the logit of the id before any of them overwrites it.
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
    """The largest logit m, Σ e^(z - m), and the mean of z (with label smoothing only)."""
    most, total, sum_of_all = float("-inf"), 0.0, 0.0
    for first in range(0, call.tile.size, call.tile.width):
        columns = first + tl.arange(0, call.tile.width)
        inside = columns < call.tile.size
        logits = capped(tl.load(start + columns, mask=inside, other=float("-inf")).to(tl.float32), call.cap)
        logits = tl.where(inside, logits, float("-inf"))
        larger = tl.maximum(most, tl.max(logits, 0))
        # If all logits so far are -inf, subtract 0 instead, which avoids NaN.
        known = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(most - known) + tl.sum(tl.exp(logits - known), 0)
        most = larger
        if call.smoothing > 0:
            sum_of_all += tl.sum(tl.where(inside, logits, 0.0), 0)
    return most, total, sum_of_all / call.tile.size


@triton.jit
def capped(logits, cap):
    """cap · tanh(logits / cap), or the logits without a cap; tanh is computed from e^-2|x|, which cannot overflow."""
    if cap is not None:
        small = tl.exp(-2 * tl.abs(logits / cap))
        size = cap * (1 - small) / (1 + small)
        logits = tl.where(logits < 0, -size, size)
    return logits
