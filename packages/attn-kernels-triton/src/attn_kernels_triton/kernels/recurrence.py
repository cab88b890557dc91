"""Arguments and helpers of the kernels for linear recurrences."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of


class ScanTile(NamedTuple):
    """Compile-time constants: tokens of a chunk and the base-2 logarithm of that (`rounds`); the sizes, and the key
    size rounded up to a power of two; the channels of keys and of values in a tile, and the number of such parts;
    whether decays are per channel (`channels`); and whether float32 products are split, see `product`."""

    chunk: Any
    rounds: Any
    key_size: Any
    value_size: Any
    key_width: Any
    keys_at_once: Any
    values_at_once: Any
    key_parts: Any
    value_parts: Any
    channels: Any
    split: Any


class Scan(NamedTuple):
    """The argument of the forward kernels; rows are tokens unless stated otherwise.

    `decay_sums` [..., K or 1], float32, are base-2 sums of log decays from the start of the chunk; `strength` is β
    [..., 1]. With the delta rule `solved_values` is X [..., V], `solved_keys` Y [..., K], `inverse` (I + βB)^-1 [...,
    C] with the products B of keys, and `new_values` E [..., V]; without it `new_values` are the values and the others
    `NO_ROWS`. `chunk_states` [batch, chunk · K, head, V] are the states S before every chunk, `before` and `after`
    [batch, K, head, V] the initial S (`NO_ROWS` for zero) and the final one.
    """

    query: Rows
    key: Rows
    value: Rows
    decay_sums: Rows
    strength: Rows
    solved_values: Rows
    solved_keys: Rows
    inverse: Rows
    new_values: Rows
    chunk_states: Rows
    before: Rows
    after: Rows
    out: Rows
    heads: Any
    tokens: Any
    tile: ScanTile


class Unscan(NamedTuple):
    """The argument of the backward kernels: that of the forward kernels, gradients that are read, and those written.

    `out` and `after` are the gradients of the output and of the final state, `NO_ROWS` for none; `chunk_states` those
    of S after every chunk, `new_values` that of N, what tokens write (βE, see `written_values`); `decay` [..., K or
    parts of K] that of the log decays, `NO_ROWS` if not needed.
    """

    scan: Scan
    out: Rows
    after: Rows
    chunk_states: Rows
    new_values: Rows
    before: Rows
    query: Rows
    key: Rows
    value: Rows
    decay: Rows
    strength: Rows


class DecaySums(NamedTuple):
    """The argument of the kernel that sums log decays; a program takes `channels` of the channels."""

    decay: Rows
    decay_sums: Rows
    heads: Any
    tokens: Any
    chunk: Any
    size: Any
    channels: Any


class Decode(NamedTuple):
    """The argument of the kernel that goes token by token with the state in registers; fields as in `Scan`."""

    query: Rows
    key: Rows
    value: Rows
    decay: Rows
    strength: Rows
    before: Rows
    after: Rows
    out: Rows
    heads: Any
    tokens: Any
    tile: ScanTile


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(split: tl.constexpr, one, other, into=None):
    """The float32 matrix product, added to `into`; `split` computes it by three TF32 products on tensor cores."""
    if split:
        found = tl.dot(one, other, into, input_precision="tf32x3")
    else:
        found = tl.dot(one, other, into, input_precision="ieee")
    return found


@triton.jit
def place(scan, parts):
    """The chunk, part, batch row and head of this program; parts of a chunk are consecutive."""
    part = tl.program_id(0) % parts
    chunks = tl.cdiv(scan.tokens, scan.tile.chunk)
    chunk = tl.program_id(0) // parts % chunks
    head = tl.program_id(0) // parts // chunks
    return chunk, part, head // scan.heads, head % scan.heads


@triton.jit
def read_part(view, who, rows, count, columns, size):
    """Load rows [rows, columns], with zeros behind the last of `count` rows and behind `size`."""
    at = start_of(view, who[0], who[1]) + rows[:, None] * view.row + columns[None, :]
    return tl.load(at, mask=(rows[:, None] < count) & (columns[None, :] < size), other=0.0)


@triton.jit
def write_part(view, who, rows, count, columns, size, content):
    """Store the rows [rows, columns] that exist, in the dtype of the tensor."""
    at = start_of(view, who[0], who[1]) + rows[:, None] * view.row + columns[None, :]
    inside = (rows[:, None] < count) & (columns[None, :] < size)
    tl.store(at, content.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def read_state(view, who, channels, columns, tile):
    """Load a state [channels, columns] in float32."""
    return read_part(view, who, channels, tile.key_size, columns, tile.value_size).to(tl.float32)


@triton.jit
def write_chunk_state(scan, view, who, chunk, at, content):
    """Store some channels and columns, `at`, of the state of a chunk."""
    cells = chunk * scan.tile.key_size + at[0]
    write_part(view, who, cells, (chunk + 1) * scan.tile.key_size, at[1], scan.tile.value_size, content)


@triton.jit
def read_chunk_state(scan, view, who, chunk, channels, columns):
    """Load some channels and columns of the state of a chunk, with zeros behind its channels."""
    cells = chunk * scan.tile.key_size + channels
    return read_part(view, who, cells, (chunk + 1) * scan.tile.key_size, columns, scan.tile.value_size)


@triton.jit
def read_strength(scan, who, rows):
    """Load the strength β of every token, float32, zero behind the last one."""
    at = start_of(scan.strength, who[0], who[1]) + rows * scan.strength.row
    return tl.load(at, mask=rows < scan.tokens, other=0.0).to(tl.float32)


@triton.jit
def decay_sums_at(scan, who, rows, columns):
    """Load the sums of log decays [rows, columns or 1]; behind the last token, those of the last one (no decay)."""
    at = start_of(scan.decay_sums, who[0], who[1]) + tl.minimum(rows, scan.tokens - 1) * scan.decay_sums.row
    if scan.tile.channels:
        found = tl.load(at[:, None] + columns[None, :], mask=columns[None, :] < scan.tile.key_size, other=0.0)
    else:
        found = tl.load(at)[:, None]
    return found


@triton.jit
def chunk_decay(scan, who, chunk, columns):
    """Load the sums of log decays over a whole chunk, [columns]."""
    last = tl.minimum((chunk + 1) * scan.tile.chunk, scan.tokens) - 1
    at = start_of(scan.decay_sums, who[0], who[1]) + last * scan.decay_sums.row
    if scan.tile.channels:
        found = tl.load(at + columns, mask=columns < scan.tile.key_size, other=0.0)
    else:
        found = tl.zeros_like(columns).to(tl.float32) + tl.load(at)
    return found


@triton.jit
def decayed_from_start(scan, content, who, rows, columns):
    """Rows times the decay from the start of the chunk to their token, in their dtype."""
    found = content
    if scan.decay_sums.data is not None:
        found = (content * tl.exp2(decay_sums_at(scan, who, rows, columns))).to(content.dtype)
    return found


@triton.jit
def decayed_to_end(scan, content, who, chunk, rows, columns):
    """Rows times the decay from their token to the end of the chunk, in their dtype."""
    found = content
    if scan.decay_sums.data is not None:
        left = chunk_decay(scan, who, chunk, columns)[None, :] - decay_sums_at(scan, who, rows, columns)
        found = (content * tl.exp2(left)).to(content.dtype)
    return found


@triton.jit
def written_values(scan, who, rows, columns):
    """The values that tokens write to the state, [rows, columns], in the dtype of the values."""
    found = read_part(scan.new_values, who, rows, scan.tokens, columns, scan.tile.value_size)
    if scan.strength.data is not None:
        found = (found * read_strength(scan, who, rows)[:, None]).to(found.dtype)
    return found


@triton.jit
def sum_decays(call):
    """Write the base-2 sums of log decays from the start of each chunk. Grid: parts of chunks of heads."""
    chunk, part, batch, head = place_of_decays(call)
    rows = chunk * call.chunk + tl.arange(0, call.chunk)
    columns = part * call.channels + tl.arange(0, call.channels)
    decay = read_part(call.decay, (batch, head), rows, call.tokens, columns, call.size).to(tl.float32)
    write_part(call.decay_sums, (batch, head), rows, call.tokens, columns, call.size, tl.cumsum(decay * LOG2_E, 0))


@triton.jit
def place_of_decays(call):
    """Like `place`, for the kernel that sums decays."""
    parts = tl.cdiv(call.size, call.channels)
    chunks = tl.cdiv(call.tokens, call.chunk)
    head = tl.program_id(0) // parts // chunks
    return tl.program_id(0) // parts % chunks, tl.program_id(0) % parts, head // call.heads, head % call.heads


@triton.jit
def pairs(scan, left, right, who, chunk):
    """The decayed products of two operands l and r over a chunk, float32 [C, C].

    Entry [i, j] is Σ_c l_ic r_jc 2^(faded_ic - faded_jc) for j ≤ i and zero for j > i.
    """
    index = tl.arange(0, scan.tile.chunk)
    rows = chunk * scan.tile.chunk + index
    found = tl.zeros([scan.tile.chunk, scan.tile.chunk], tl.float32)
    for first in range(0, scan.tile.key_width, scan.tile.keys_at_once):
        columns = first + tl.arange(0, scan.tile.keys_at_once)
        one = read_part(left, who, rows, scan.tokens, columns, scan.tile.key_size)
        other = read_part(right, who, rows, scan.tokens, columns, scan.tile.key_size)
        if scan.tile.channels:
            found += channel_pairs(scan, who, one, other, rows, columns)
        else:
            found = product(scan.tile.split, one, tl.trans(other), found)
    if not scan.tile.channels:
        found *= decay_between(scan, who, rows)
    return tl.where(index[:, None] >= index[None, :], found, 0.0)


@triton.jit
def decay_between(scan, who, rows):
    """The decay between two tokens of a chunk, for one decay per head, [C, C]; 1 where the second token is later."""
    found = 1.0
    if scan.decay_sums.data is not None:
        decay_sums = decay_sums_at(scan, who, rows, rows)
        found = tl.exp2(tl.minimum(decay_sums - tl.trans(decay_sums), 0.0))
    return found


@triton.jit
def channel_pairs(scan, who, one, other, rows, columns):
    """Like `pairs`, over some channels with a decay each; entries above the diagonal are zero."""
    index = tl.arange(0, scan.tile.chunk)
    decay_sums = decay_sums_at(scan, who, rows, columns)
    own = tl.sum(one.to(tl.float32) * other.to(tl.float32), 1)
    found = tl.where(index[:, None] == index[None, :], own[:, None], 0.0)
    for level in range(scan.tile.rounds):
        half = 1 << level
        later, left = halves(scan, who, (rows, columns), decay_sums, half)
        upper = tl.where(later[:, None], one * left, 0.0).to(one.dtype)
        lower = tl.where(later[:, None], 0.0, other * left).to(one.dtype)
        across = product(scan.tile.split, upper, tl.trans(lower))
        found += tl.where(index[:, None] // (2 * half) == index[None, :] // (2 * half), across, 0.0)
    return found


@triton.jit
def halves(scan, who, at, decay_sums, half):
    """Which tokens are in the second half of their block of 2 `half`, and the decay between each token and the middle
    of its block."""
    index = tl.arange(0, scan.tile.chunk)
    later = index // half % 2 == 1
    middle = decay_sums_at(scan, who, at[0] - index % (2 * half) + half - 1, at[1])
    return later, tl.exp2(tl.where(later[:, None], decay_sums - middle, middle - decay_sums))


@triton.jit
def through_pairs(scan, change, content, who, at):
    """The gradients [C, columns] of both operands of `pairs`, given that of the result, which is zero where `pairs`
    is."""
    one, other = content
    rows, columns = at
    if scan.tile.channels:
        index = tl.arange(0, scan.tile.chunk)
        decay_sums = decay_sums_at(scan, who, rows, columns)
        own = tl.sum(tl.where(index[:, None] == index[None, :], change, 0.0), 1)[:, None]
        to_one, to_other = own * other, own * one
        for level in range(scan.tile.rounds):
            half = 1 << level
            later, left = halves(scan, who, at, decay_sums, half)
            same = index[:, None] // (2 * half) == index[None, :] // (2 * half)
            across = same & later[:, None] & (index[None, :] // half % 2 == 0)
            part = tl.where(across, change, 0.0).to(one.dtype)
            upper, lower = (one * left).to(one.dtype), (other * left).to(one.dtype)
            to_one += left * product(scan.tile.split, part, lower)
            to_other += left * product(scan.tile.split, tl.trans(part), upper)
    else:
        part = (change * decay_between(scan, who, rows)).to(one.dtype)
        to_one = product(scan.tile.split, part, other)
        to_other = product(scan.tile.split, tl.trans(part), one)
    return to_one, to_other
