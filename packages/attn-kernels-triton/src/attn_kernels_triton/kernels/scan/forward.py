"""The forward programs of a recurrence: one remembers from chunk to chunk, the other reads all chunks at once."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.scan.pairs import pairs
from attn_kernels_triton.kernels.scan.rows import (
    early,
    fading,
    late,
    news_of,
    place,
    product,
    read_memory,
    read_part,
    read_strength,
    state_part,
    write_part,
    write_state,
)


@triton.jit
def remember(scan):
    """S before every chunk, and by the delta rule E. Grid: parts of the values of heads."""
    head = tl.program_id(0) // scan.tile.value_parts
    who = (head // scan.heads, head % scan.heads)
    channels = tl.arange(0, scan.tile.key_width)
    columns = tl.program_id(0) % scan.tile.value_parts * scan.tile.values_at_once + tl.arange(
        0, scan.tile.values_at_once
    )
    memory = tl.zeros([scan.tile.key_width, scan.tile.values_at_once], tl.float32)
    if scan.before.data is not None:
        memory += read_memory(scan.before, who, channels, columns, scan.tile)
    for chunk in range(tl.cdiv(scan.tokens, scan.tile.chunk)):
        rows = chunk * scan.tile.chunk + tl.arange(0, scan.tile.chunk)
        held = memory.to(scan.states.data.dtype.element_ty)
        write_state(scan, scan.states, who, chunk, (channels, columns), held)
        if scan.strength.data is None:
            news = read_part(scan.value, who, rows, scan.tokens, columns, scan.tile.value_size)
        else:
            told = read_part(scan.told, who, rows, scan.tokens, channels, scan.tile.key_size)
            news = read_part(scan.solved, who, rows, scan.tokens, columns, scan.tile.value_size)
            news = (news - product(scan.tile.split, told, held)).to(held.dtype)
            write_part(scan.news, who, rows, scan.tokens, columns, scan.tile.value_size, news)
            news = (news * read_strength(scan, who, rows)[:, None]).to(held.dtype)
        key = read_part(scan.key, who, rows, scan.tokens, channels, scan.tile.key_size)
        key = late(scan, key, who, chunk, rows, channels)
        if scan.faded.data is not None:
            memory *= tl.exp2(fading(scan, who, chunk, channels))[:, None]
        memory = product(scan.tile.split, tl.trans(key), news, memory)
    write_part(scan.after, who, channels, scan.tile.key_size, columns, scan.tile.value_size, memory)


@triton.jit
def recall(scan):
    """The output. Grid: parts of the values of chunks of heads."""
    chunk, part, batch, head = place(scan, scan.tile.value_parts)
    who = (batch, head)
    rows = chunk * scan.tile.chunk + tl.arange(0, scan.tile.chunk)
    columns = part * scan.tile.values_at_once + tl.arange(0, scan.tile.values_at_once)
    news = news_of(scan, who, rows, columns)
    reach = pairs(scan, scan.query, scan.key, who, chunk).to(news.dtype)
    out = product(scan.tile.split, reach, news)
    for first in range(0, scan.tile.key_width, scan.tile.keys_at_once):
        channels = first + tl.arange(0, scan.tile.keys_at_once)
        query = read_part(scan.query, who, rows, scan.tokens, channels, scan.tile.key_size)
        memory = state_part(scan, scan.states, who, chunk, channels, columns)
        query = early(scan, query, who, rows, channels)
        out = product(scan.tile.split, query, memory, out)
    write_part(scan.out, who, rows, scan.tokens, columns, scan.tile.value_size, out)
