"""The backward programs of a recurrence that go with those of the forward pass, in the reverse order.

To read (through pairs) first, then from chunk to chunk backwards; what flows to queries, keys and decays is apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.scan.pairs import pairs
from attn_kernels_triton.kernels.scan.rows import (
    early,
    fading,
    late,
    place,
    product,
    read_memory,
    read_part,
    read_strength,
    write_part,
    write_state,
)


@triton.jit
def unrecall(call):
    """The part of the gradient to N that flows through pairs, Pᵀ do. Grid: parts of the values of chunks of heads."""
    chunk, part, batch, head = place(call.scan, call.scan.tile.value_parts)
    who = (batch, head)
    rows = chunk * call.scan.tile.chunk + tl.arange(0, call.scan.tile.chunk)
    columns = part * call.scan.tile.values_at_once + tl.arange(0, call.scan.tile.values_at_once)
    change = read_part(call.out, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
    reach = pairs(call.scan, call.scan.query, call.scan.key, who, chunk).to(change.dtype)
    news = product(call.scan.tile.split, tl.trans(reach), change)
    write_part(call.news, who, rows, call.scan.tokens, columns, call.scan.tile.value_size, news)


@triton.jit
def unremember(call):
    """The gradients to S after every chunk and before the first, and to N. Grid: parts of the values of heads."""
    head = tl.program_id(0) // call.scan.tile.value_parts
    who = (head // call.scan.heads, head % call.scan.heads)
    channels = tl.arange(0, call.scan.tile.key_width)
    columns = tl.program_id(0) % call.scan.tile.value_parts * call.scan.tile.values_at_once + tl.arange(
        0, call.scan.tile.values_at_once
    )
    memory = tl.zeros([call.scan.tile.key_width, call.scan.tile.values_at_once], tl.float32)
    if call.after.data is not None:
        memory += read_memory(call.after, who, channels, columns, call.scan.tile)
    chunks = tl.cdiv(call.scan.tokens, call.scan.tile.chunk)
    for step in range(chunks):
        chunk = chunks - 1 - step
        rows = chunk * call.scan.tile.chunk + tl.arange(0, call.scan.tile.chunk)
        held = memory.to(call.states.data.dtype.element_ty)
        write_state(call.scan, call.states, who, chunk, (channels, columns), held)
        key = read_part(call.scan.key, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
        key = late(call.scan, key, who, chunk, rows, channels)
        news = read_part(call.news, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        news = product(call.scan.tile.split, key, held, news.to(tl.float32)).to(held.dtype)
        write_part(call.news, who, rows, call.scan.tokens, columns, call.scan.tile.value_size, news)
        query = read_part(call.scan.query, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
        query = early(call.scan, query, who, rows, channels)
        change = read_part(call.out, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        if call.scan.faded.data is not None:
            memory *= tl.exp2(fading(call.scan, who, chunk, channels))[:, None]
        memory = product(call.scan.tile.split, tl.trans(query), change, memory)
        if call.scan.strength.data is not None:
            told = read_part(call.scan.told, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
            news = (news * -read_strength(call.scan, who, rows)[:, None]).to(held.dtype)
            memory = product(call.scan.tile.split, tl.trans(told), news, memory)
    if call.before.data is not None:
        write_part(call.before, who, channels, call.scan.tile.key_size, columns, call.scan.tile.value_size, memory)


@triton.jit
def uncorrect(call):
    """By the delta rule, gradients to values and strengths: with F = (I + βB)^-ᵀ dN, β F and F · E. Grid: chunks."""
    chunk, _, batch, head = place(call.scan, 1)
    who = (batch, head)
    index = tl.arange(0, call.scan.tile.chunk)
    rows = chunk * call.scan.tile.chunk + index
    strength = read_strength(call.scan, who, rows)
    inverse = tl.trans(read_part(call.scan.inverse, who, rows, call.scan.tokens, index, call.scan.tile.chunk))
    told = tl.zeros([call.scan.tile.chunk], tl.float32)
    for first in range(0, call.scan.tile.value_size, call.scan.tile.values_at_once):
        columns = first + tl.arange(0, call.scan.tile.values_at_once)
        change = read_part(call.news, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        found = product(call.scan.tile.split, inverse, change)
        write_part(
            call.value, who, rows, call.scan.tokens, columns, call.scan.tile.value_size, found * strength[:, None]
        )
        news = read_part(call.scan.news, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        told += tl.sum(found * news, 1)
    write_part(call.strength, who, rows, call.scan.tokens, tl.arange(0, 1), 1, told[:, None])
