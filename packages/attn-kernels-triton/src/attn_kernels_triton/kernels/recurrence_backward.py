"""The backward kernels of linear recurrences by chunks; the symbols are those of `Scan` and `Unscan`."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.recurrence import (
    early,
    faded_at,
    fading,
    late,
    news_of,
    pairs,
    place,
    product,
    read_memory,
    read_part,
    read_strength,
    state_part,
    through_pairs,
    write_part,
    write_state,
)


@triton.jit
def unrecall(call):
    """Write the part of the gradient of N through `pairs` P, Pᵀ do. Grid: parts of the values of chunks of heads."""
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
    """Write the gradients of S after every chunk and before the first, and of N. Grid: parts of the values of heads."""
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
    """Write the gradients of values and strengths of the delta rule: with F = (I + βB)^-ᵀ dN, they are β F and F · E.

    Grid: chunks of heads.
    """
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


@triton.jit
def gradient_to_channels(call):
    """Write the gradients of queries, keys and log decays. Grid: parts of the keys of chunks of heads."""
    chunk, part, batch, head = place(call.scan, call.scan.tile.key_parts)
    who = (batch, head)
    rows = chunk * call.scan.tile.chunk + tl.arange(0, call.scan.tile.chunk)
    channels = part * call.scan.tile.keys_at_once + tl.arange(0, call.scan.tile.keys_at_once)
    met, to_early, to_late, held = through_memory(call, who, (chunk, rows, channels))
    query = read_part(call.scan.query, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
    key = read_part(call.scan.key, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
    to_query, to_corrected = to_early
    if call.scan.faded.data is not None:
        faded, whole = faded_at(call.scan, who, rows, channels), fading(call.scan, who, chunk, channels)
        to_query *= tl.exp2(faded)
        to_corrected *= tl.exp2(faded)
        to_late *= tl.exp2(whole[None, :] - faded)
        held = held * tl.exp2(whole) + tl.sum(key * to_late, 0)
    through, to_earlier = through_pairs(call.scan, met[0], (query, key), who, (rows, channels))
    to_query += through
    to_later = to_corrected
    to_earlier += to_late
    if call.scan.strength.data is not None:
        through, among = through_pairs(call.scan, met[1], (key, key), who, (rows, channels))
        to_later += through
        to_earlier += among
    write_part(call.query, who, rows, call.scan.tokens, channels, call.scan.tile.key_size, to_query)
    write_part(call.key, who, rows, call.scan.tokens, channels, call.scan.tile.key_size, to_later + to_earlier)
    if call.decay.data is not None:
        # Sums of decays only scale queries and keys, so their gradient follows from those of queries and keys.
        to_decay = query * to_query + key * (to_later - to_earlier)
        if call.scan.tile.channels:
            found = tl.cumsum(to_decay, 0, reverse=True) + held[None, :]
            write_part(call.decay, who, rows, call.scan.tokens, channels, call.scan.tile.key_size, found)
        else:
            found = tl.cumsum(tl.sum(to_decay, 1), 0, reverse=True) + tl.sum(held, 0)
            here = part + tl.arange(0, 1)
            write_part(call.decay, who, rows, call.scan.tokens, here, part + 1, found[:, None])


@triton.jit
def through_memory(call, who, at):
    """Gradients summed over all columns of the values.

    They are those of the `pairs` of queries and keys and, with the delta rule, of keys and keys, [C, C]; of queries and
    keys scaled by `early`, of keys scaled by `late`, [C, channels]; and the products S · dS', [channels].
    """
    chunk, rows, channels = at
    index = tl.arange(0, call.scan.tile.chunk)
    met = tl.zeros([call.scan.tile.chunk, call.scan.tile.chunk], tl.float32)
    among = tl.zeros([call.scan.tile.chunk, call.scan.tile.chunk], tl.float32)
    to_query = tl.zeros([call.scan.tile.chunk, call.scan.tile.keys_at_once], tl.float32)
    to_corrected = tl.zeros([call.scan.tile.chunk, call.scan.tile.keys_at_once], tl.float32)
    to_late = tl.zeros([call.scan.tile.chunk, call.scan.tile.keys_at_once], tl.float32)
    held = tl.zeros([call.scan.tile.keys_at_once], tl.float32)
    for first in range(0, call.scan.tile.value_size, call.scan.tile.values_at_once):
        columns = first + tl.arange(0, call.scan.tile.values_at_once)
        change = read_part(call.out, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        news = news_of(call.scan, who, rows, columns)
        before = state_part(call.scan, call.scan.states, who, chunk, channels, columns)
        after = state_part(call.scan, call.states, who, chunk, channels, columns)
        met = product(call.scan.tile.split, change, tl.trans(news), met)
        to_query = product(call.scan.tile.split, change, tl.trans(before), to_query)
        to_late = product(call.scan.tile.split, news, tl.trans(after), to_late)
        held += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
        if call.scan.strength.data is not None:
            told = read_part(call.value, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
            among = product(call.scan.tile.split, told, tl.trans(news), among)
            to_corrected = product(call.scan.tile.split, told, tl.trans(before), to_corrected)
    met = tl.where(index[:, None] >= index[None, :], met, 0.0)
    among = tl.where(index[:, None] > index[None, :], -among, 0.0)
    return (met, among), (to_query, -to_corrected), to_late, held
