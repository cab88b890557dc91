"""The backward program that owns some channels of the keys of a chunk: gradients to queries, keys and log decays."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.scan.pairs import through_pairs
from attn_kernels_triton.kernels.scan.rows import (
    faded_at,
    fading,
    news_of,
    place,
    product,
    read_part,
    state_part,
    write_part,
)


@triton.jit
def gradient_to_channels(call):
    """Grid: parts of the keys of chunks of heads."""
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
        # Everything depends on sums of decays by way of queries and keys that they scale, so the gradient does too.
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
    """Gradients of all columns of values: to pairs of queries and keys and, by the delta rule, of keys, [C, C]; to
    queries and keys times what is left of the memory, to keys times what will be, [C, channels]; and S · dS'."""
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
