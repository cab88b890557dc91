"""The backward kernels of linear recurrences by chunks; the symbols are those of `Scan` and `Unscan`."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.recurrence import (
    chunk_decay,
    decay_sums_at,
    decayed_from_start,
    decayed_to_end,
    pairs,
    place,
    product,
    read_chunk_state,
    read_part,
    read_state,
    read_strength,
    through_pairs,
    write_chunk_state,
    write_part,
    written_values,
)


@triton.jit
def unrecall(call):
    """Write the part of the gradient of N through `pairs` P, Pᵀ do. Grid: parts of the values of chunks of heads."""
    chunk, part, batch, head = place(call.scan, call.scan.tile.value_parts)
    who = (batch, head)
    rows = chunk * call.scan.tile.chunk + tl.arange(0, call.scan.tile.chunk)
    columns = part * call.scan.tile.values_at_once + tl.arange(0, call.scan.tile.values_at_once)
    change = read_part(call.out, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
    scores = pairs(call.scan, call.scan.query, call.scan.key, who, chunk).to(change.dtype)
    new_values = product(call.scan.tile.split, tl.trans(scores), change)
    write_part(call.new_values, who, rows, call.scan.tokens, columns, call.scan.tile.value_size, new_values)


@triton.jit
def unremember(call):
    """Write the gradients of S after every chunk and before the first, and of N. Grid: parts of the values of heads."""
    head = tl.program_id(0) // call.scan.tile.value_parts
    who = (head // call.scan.heads, head % call.scan.heads)
    channels = tl.arange(0, call.scan.tile.key_width)
    columns = tl.program_id(0) % call.scan.tile.value_parts * call.scan.tile.values_at_once + tl.arange(
        0, call.scan.tile.values_at_once
    )
    state = tl.zeros([call.scan.tile.key_width, call.scan.tile.values_at_once], tl.float32)
    if call.after.data is not None:
        state += read_state(call.after, who, channels, columns, call.scan.tile)
    chunks = tl.cdiv(call.scan.tokens, call.scan.tile.chunk)
    for step in range(chunks):
        chunk = chunks - 1 - step
        rows = chunk * call.scan.tile.chunk + tl.arange(0, call.scan.tile.chunk)
        held = state.to(call.chunk_states.data.dtype.element_ty)
        write_chunk_state(call.scan, call.chunk_states, who, chunk, (channels, columns), held)
        key = read_part(call.scan.key, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
        key = decayed_to_end(call.scan, key, who, chunk, rows, channels)
        new_values = read_part(call.new_values, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        new_values = product(call.scan.tile.split, key, held, new_values.to(tl.float32)).to(held.dtype)
        write_part(call.new_values, who, rows, call.scan.tokens, columns, call.scan.tile.value_size, new_values)
        query = read_part(call.scan.query, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
        query = decayed_from_start(call.scan, query, who, rows, channels)
        change = read_part(call.out, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        if call.scan.decay_sums.data is not None:
            state *= tl.exp2(chunk_decay(call.scan, who, chunk, channels))[:, None]
        state = product(call.scan.tile.split, tl.trans(query), change, state)
        if call.scan.strength.data is not None:
            solved_keys = read_part(
                call.scan.solved_keys, who, rows, call.scan.tokens, channels, call.scan.tile.key_size
            )
            new_values = (new_values * -read_strength(call.scan, who, rows)[:, None]).to(held.dtype)
            state = product(call.scan.tile.split, tl.trans(solved_keys), new_values, state)
    if call.before.data is not None:
        write_part(call.before, who, channels, call.scan.tile.key_size, columns, call.scan.tile.value_size, state)


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
    strength_gradient = tl.zeros([call.scan.tile.chunk], tl.float32)
    for first in range(0, call.scan.tile.value_size, call.scan.tile.values_at_once):
        columns = first + tl.arange(0, call.scan.tile.values_at_once)
        change = read_part(call.new_values, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        found = product(call.scan.tile.split, inverse, change)
        write_part(
            call.value, who, rows, call.scan.tokens, columns, call.scan.tile.value_size, found * strength[:, None]
        )
        new_values = read_part(call.scan.new_values, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        strength_gradient += tl.sum(found * new_values, 1)
    write_part(call.strength, who, rows, call.scan.tokens, tl.arange(0, 1), 1, strength_gradient[:, None])


@triton.jit
def gradient_to_channels(call):
    """Write the gradients of queries, keys and log decays. Grid: parts of the keys of chunks of heads."""
    chunk, part, batch, head = place(call.scan, call.scan.tile.key_parts)
    who = (batch, head)
    rows = chunk * call.scan.tile.chunk + tl.arange(0, call.scan.tile.chunk)
    channels = part * call.scan.tile.keys_at_once + tl.arange(0, call.scan.tile.keys_at_once)
    to_pairs, to_start_decayed, to_end_decayed, held = through_state(call, who, (chunk, rows, channels))
    query = read_part(call.scan.query, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
    key = read_part(call.scan.key, who, rows, call.scan.tokens, channels, call.scan.tile.key_size)
    to_query, to_corrected = to_start_decayed
    if call.scan.decay_sums.data is not None:
        decay_sums, whole = decay_sums_at(call.scan, who, rows, channels), chunk_decay(call.scan, who, chunk, channels)
        to_query *= tl.exp2(decay_sums)
        to_corrected *= tl.exp2(decay_sums)
        to_end_decayed *= tl.exp2(whole[None, :] - decay_sums)
        held = held * tl.exp2(whole) + tl.sum(key * to_end_decayed, 0)
    through, to_earlier = through_pairs(call.scan, to_pairs[0], (query, key), who, (rows, channels))
    to_query += through
    to_later = to_corrected
    to_earlier += to_end_decayed
    if call.scan.strength.data is not None:
        through, to_other_key = through_pairs(call.scan, to_pairs[1], (key, key), who, (rows, channels))
        to_later += through
        to_earlier += to_other_key
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
def through_state(call, who, at):
    """Gradients summed over all columns of the values.

    They are those of the `pairs` of queries and keys and, with the delta rule, of keys and keys, [C, C]; of queries and
    keys scaled by `decayed_from_start`, of keys scaled by `decayed_to_end`, [C, channels]; and the products S · dS',
    [channels].
    """
    chunk, rows, channels = at
    index = tl.arange(0, call.scan.tile.chunk)
    to_query_key = tl.zeros([call.scan.tile.chunk, call.scan.tile.chunk], tl.float32)
    to_key_key = tl.zeros([call.scan.tile.chunk, call.scan.tile.chunk], tl.float32)
    to_query = tl.zeros([call.scan.tile.chunk, call.scan.tile.keys_at_once], tl.float32)
    to_corrected = tl.zeros([call.scan.tile.chunk, call.scan.tile.keys_at_once], tl.float32)
    to_end_decayed = tl.zeros([call.scan.tile.chunk, call.scan.tile.keys_at_once], tl.float32)
    held = tl.zeros([call.scan.tile.keys_at_once], tl.float32)
    for first in range(0, call.scan.tile.value_size, call.scan.tile.values_at_once):
        columns = first + tl.arange(0, call.scan.tile.values_at_once)
        change = read_part(call.out, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
        new_values = written_values(call.scan, who, rows, columns)
        before = read_chunk_state(call.scan, call.scan.chunk_states, who, chunk, channels, columns)
        after = read_chunk_state(call.scan, call.chunk_states, who, chunk, channels, columns)
        to_query_key = product(call.scan.tile.split, change, tl.trans(new_values), to_query_key)
        to_query = product(call.scan.tile.split, change, tl.trans(before), to_query)
        to_end_decayed = product(call.scan.tile.split, new_values, tl.trans(after), to_end_decayed)
        held += tl.sum(before.to(tl.float32) * after.to(tl.float32), 1)
        if call.scan.strength.data is not None:
            value_gradient = read_part(call.value, who, rows, call.scan.tokens, columns, call.scan.tile.value_size)
            to_key_key = product(call.scan.tile.split, value_gradient, tl.trans(new_values), to_key_key)
            to_corrected = product(call.scan.tile.split, value_gradient, tl.trans(before), to_corrected)
    to_query_key = tl.where(index[:, None] >= index[None, :], to_query_key, 0.0)
    to_key_key = tl.where(index[:, None] > index[None, :], -to_key_key, 0.0)
    return (to_query_key, to_key_key), (to_query, -to_corrected), to_end_decayed, held
