"""Reading and writing parts of rows, and what is left of them."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rows import start_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(split: tl.constexpr, one, other, into=None):
    """A product of matrices, added to another, in float32; `split` is for matrix units: in three products of halves."""
    if split:
        found = tl.dot(one, other, into, input_precision="tf32x3")
    else:
        found = tl.dot(one, other, into, input_precision="ieee")
    return found


@triton.jit
def place(scan, parts):
    """Chunk, part, batch and head of a program; parts of a chunk come one after the other."""
    part = tl.program_id(0) % parts
    chunks = tl.cdiv(scan.tokens, scan.tile.chunk)
    chunk = tl.program_id(0) // parts % chunks
    head = tl.program_id(0) // parts // chunks
    return chunk, part, head // scan.heads, head % scan.heads


@triton.jit
def read_part(view, who, rows, count, columns, size):
    """Rows [rows, columns], zeros behind the last of `count` rows and behind `size`."""
    at = start_of(view, who[0], who[1]) + rows[:, None] * view.row + columns[None, :]
    return tl.load(at, mask=(rows[:, None] < count) & (columns[None, :] < size), other=0.0)


@triton.jit
def write_part(view, who, rows, count, columns, size, content):
    """Write rows [rows, columns] as far as they exist, in the type of the tensor."""
    at = start_of(view, who[0], who[1]) + rows[:, None] * view.row + columns[None, :]
    inside = (rows[:, None] < count) & (columns[None, :] < size)
    tl.store(at, content.to(view.data.dtype.element_ty), mask=inside)


@triton.jit
def read_memory(view, who, channels, columns, tile):
    """A memory [channels, columns] in float32."""
    return read_part(view, who, channels, tile.key_size, columns, tile.value_size).to(tl.float32)


@triton.jit
def write_state(scan, view, who, chunk, at, content):
    """Write channels and columns of what is kept for a chunk."""
    cells = chunk * scan.tile.key_size + at[0]
    write_part(view, who, cells, (chunk + 1) * scan.tile.key_size, at[1], scan.tile.value_size, content)


@triton.jit
def state_part(scan, view, who, chunk, channels, columns):
    """Some channels and columns of what is kept for a chunk, zeros behind its channels."""
    cells = chunk * scan.tile.key_size + channels
    return read_part(view, who, cells, (chunk + 1) * scan.tile.key_size, columns, scan.tile.value_size)


@triton.jit
def read_strength(scan, who, rows):
    """The strength of every token, float32, zero behind the last."""
    at = start_of(scan.strength, who[0], who[1]) + rows * scan.strength.row
    return tl.load(at, mask=rows < scan.tokens, other=0.0).to(tl.float32)


@triton.jit
def faded_at(scan, who, rows, columns):
    """Sums of log decays [rows, columns or 1]; behind the last token, where nothing fades, those of the last."""
    at = start_of(scan.faded, who[0], who[1]) + tl.minimum(rows, scan.tokens - 1) * scan.faded.row
    if scan.tile.channels:
        found = tl.load(at[:, None] + columns[None, :], mask=columns[None, :] < scan.tile.key_size, other=0.0)
    else:
        found = tl.load(at)[:, None]
    return found


@triton.jit
def fading(scan, who, chunk, columns):
    """The sums of log decays of a whole chunk, [columns]."""
    last = tl.minimum((chunk + 1) * scan.tile.chunk, scan.tokens) - 1
    at = start_of(scan.faded, who[0], who[1]) + last * scan.faded.row
    if scan.tile.channels:
        found = tl.load(at + columns, mask=columns < scan.tile.key_size, other=0.0)
    else:
        found = tl.zeros_like(columns).to(tl.float32) + tl.load(at)
    return found


@triton.jit
def early(scan, content, who, rows, columns):
    """Rows times what is left, at their token, of the memory before the chunk; in their type."""
    found = content
    if scan.faded.data is not None:
        found = (content * tl.exp2(faded_at(scan, who, rows, columns))).to(content.dtype)
    return found


@triton.jit
def late(scan, content, who, chunk, rows, columns):
    """Rows times what will be left of them at the end of the chunk; in their type."""
    found = content
    if scan.faded.data is not None:
        left = fading(scan, who, chunk, columns)[None, :] - faded_at(scan, who, rows, columns)
        found = (content * tl.exp2(left)).to(content.dtype)
    return found


@triton.jit
def news_of(scan, who, rows, columns):
    """What tokens write, [rows, columns], in the type of the values."""
    found = read_part(scan.news, who, rows, scan.tokens, columns, scan.tile.value_size)
    if scan.strength.data is not None:
        found = (found * read_strength(scan, who, rows)[:, None]).to(found.dtype)
    return found


@triton.jit
def sum_decays(call):
    """Sums of log decays from the start of each chunk, to the base 2. Grid: parts of chunks of heads."""
    chunk, part, batch, head = place_of_decays(call)
    rows = chunk * call.chunk + tl.arange(0, call.chunk)
    columns = part * call.channels + tl.arange(0, call.channels)
    decay = read_part(call.decay, (batch, head), rows, call.tokens, columns, call.size).to(tl.float32)
    write_part(call.faded, (batch, head), rows, call.tokens, columns, call.size, tl.cumsum(decay * LOG2_E, 0))


@triton.jit
def place_of_decays(call):
    """As `place`, for the program that sums decays."""
    parts = tl.cdiv(call.size, call.channels)
    chunks = tl.cdiv(call.tokens, call.chunk)
    head = tl.program_id(0) // parts // chunks
    return tl.program_id(0) // parts % chunks, tl.program_id(0) % parts, head // call.heads, head % call.heads
