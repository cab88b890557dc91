"""The forward kernels of linear recurrences, by chunks and token by token; the symbols are those of `Scan`."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.common import start_of
from attn_kernels_triton.kernels.recurrence import (
    LOG2_E,
    chunk_decay,
    decayed_from_start,
    decayed_to_end,
    pairs,
    place,
    product,
    read_chunk_state,
    read_part,
    read_state,
    read_strength,
    write_chunk_state,
    write_part,
    written_values,
)


@triton.jit
def correct(scan):
    """Write (I + βB)^-1, X and Y of the delta rule. Grid: chunks of heads."""
    chunk, _, batch, head = place(scan, 1)
    who = (batch, head)
    index = tl.arange(0, scan.tile.chunk)
    rows = chunk * scan.tile.chunk + index
    same = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    products = tl.where(index[:, None] > index[None, :], pairs(scan, scan.key, scan.key, who, chunk), 0.0)
    strength = read_strength(scan, who, rows)
    inverse = inverted(scan, strength[:, None] * products)
    write_part(scan.inverse, who, rows, scan.tokens, index, scan.tile.chunk, inverse)
    solving = same - solving_product(scan, products, inverse * strength[None, :])
    solving = solving.to(scan.key.data.dtype.element_ty)
    for first in range(0, scan.tile.key_width, scan.tile.keys_at_once):
        columns = first + tl.arange(0, scan.tile.keys_at_once)
        key = read_part(scan.key, who, rows, scan.tokens, columns, scan.tile.key_size)
        solved_keys = product(scan.tile.split, solving, decayed_from_start(scan, key, who, rows, columns))
        write_part(scan.solved_keys, who, rows, scan.tokens, columns, scan.tile.key_size, solved_keys)
    for first in range(0, scan.tile.value_size, scan.tile.values_at_once):
        columns = first + tl.arange(0, scan.tile.values_at_once)
        value = read_part(scan.value, who, rows, scan.tokens, columns, scan.tile.value_size)
        solved_values = product(scan.tile.split, solving, value)
        write_part(scan.solved_values, who, rows, scan.tokens, columns, scan.tile.value_size, solved_values)


@triton.jit
def inverted(scan, lower):
    """(I + L)^-1 for a strictly lower triangular L [C, C], by doubling: ((A, 0), (B, D))^-1 from those of A and D."""
    index = tl.arange(0, scan.tile.chunk)
    found = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    for level in range(scan.tile.rounds):
        half = 1 << level
        same = index[:, None] // (2 * half) == index[None, :] // (2 * half)
        across = same & (index[:, None] // half % 2 == 1) & (index[None, :] // half % 2 == 0)
        block = solving_product(scan, found, tl.where(across, lower, 0.0))
        found -= solving_product(scan, block, found)
    return found


@triton.jit
def solving_product(scan, one, other):
    """The product of float32 matrices; for 16-bit keys in TF32, which is precise enough for them."""
    if scan.tile.split and scan.key.data.dtype.element_ty != tl.float32:
        found = tl.dot(one, other, input_precision="tf32")
    else:
        found = product(scan.tile.split, one, other)
    return found


@triton.jit
def remember(scan):
    """Write S before every chunk and after the last, and E of the delta rule. Grid: parts of the values of heads."""
    head = tl.program_id(0) // scan.tile.value_parts
    who = (head // scan.heads, head % scan.heads)
    channels = tl.arange(0, scan.tile.key_width)
    columns = tl.program_id(0) % scan.tile.value_parts * scan.tile.values_at_once + tl.arange(
        0, scan.tile.values_at_once
    )
    state = tl.zeros([scan.tile.key_width, scan.tile.values_at_once], tl.float32)
    if scan.before.data is not None:
        state += read_state(scan.before, who, channels, columns, scan.tile)
    for chunk in range(tl.cdiv(scan.tokens, scan.tile.chunk)):
        rows = chunk * scan.tile.chunk + tl.arange(0, scan.tile.chunk)
        held = state.to(scan.chunk_states.data.dtype.element_ty)
        write_chunk_state(scan, scan.chunk_states, who, chunk, (channels, columns), held)
        if scan.strength.data is None:
            new_values = read_part(scan.value, who, rows, scan.tokens, columns, scan.tile.value_size)
        else:
            solved_keys = read_part(scan.solved_keys, who, rows, scan.tokens, channels, scan.tile.key_size)
            new_values = read_part(scan.solved_values, who, rows, scan.tokens, columns, scan.tile.value_size)
            new_values = (new_values - product(scan.tile.split, solved_keys, held)).to(held.dtype)
            write_part(scan.new_values, who, rows, scan.tokens, columns, scan.tile.value_size, new_values)
            new_values = (new_values * read_strength(scan, who, rows)[:, None]).to(held.dtype)
        key = read_part(scan.key, who, rows, scan.tokens, channels, scan.tile.key_size)
        key = decayed_to_end(scan, key, who, chunk, rows, channels)
        if scan.decay_sums.data is not None:
            state *= tl.exp2(chunk_decay(scan, who, chunk, channels))[:, None]
        state = product(scan.tile.split, tl.trans(key), new_values, state)
    write_part(scan.after, who, channels, scan.tile.key_size, columns, scan.tile.value_size, state)


@triton.jit
def recall(scan):
    """Write the output. Grid: parts of the values of chunks of heads."""
    chunk, part, batch, head = place(scan, scan.tile.value_parts)
    who = (batch, head)
    rows = chunk * scan.tile.chunk + tl.arange(0, scan.tile.chunk)
    columns = part * scan.tile.values_at_once + tl.arange(0, scan.tile.values_at_once)
    new_values = written_values(scan, who, rows, columns)
    scores = pairs(scan, scan.query, scan.key, who, chunk).to(new_values.dtype)
    out = product(scan.tile.split, scores, new_values)
    for first in range(0, scan.tile.key_width, scan.tile.keys_at_once):
        channels = first + tl.arange(0, scan.tile.keys_at_once)
        query = read_part(scan.query, who, rows, scan.tokens, channels, scan.tile.key_size)
        state = read_chunk_state(scan, scan.chunk_states, who, chunk, channels, columns)
        query = decayed_from_start(scan, query, who, rows, channels)
        out = product(scan.tile.split, query, state, out)
    write_part(scan.out, who, rows, scan.tokens, columns, scan.tile.value_size, out)


@triton.jit
def go_through(call):
    """Write the outputs and the final state, token by token. Grid: parts of the values of heads."""
    head = tl.program_id(0) // call.tile.value_parts
    who = (head // call.heads, head % call.heads)
    channels = tl.arange(0, call.tile.key_width)
    columns = tl.program_id(0) % call.tile.value_parts * call.tile.values_at_once + tl.arange(
        0, call.tile.values_at_once
    )
    state = tl.zeros([call.tile.key_width, call.tile.values_at_once], tl.float32)
    if call.before.data is not None:
        state += read_state(call.before, who, channels, columns, call.tile)
    for token in range(call.tokens):
        key = row_of(call.key, who, token, channels, call.tile.key_size)
        value = row_of(call.value, who, token, columns, call.tile.value_size)
        if call.decay.data is not None:
            if call.tile.channels:
                left = row_of(call.decay, who, token, channels, call.tile.key_size)
                state *= tl.exp2(left * LOG2_E)[:, None]
            else:
                left = tl.load(start_of(call.decay, who[0], who[1]) + token * call.decay.row).to(tl.float32)
                state *= tl.exp2(left * LOG2_E)
        if call.strength.data is not None:
            strength = tl.load(start_of(call.strength, who[0], who[1]) + token * call.strength.row).to(tl.float32)
            value = strength * (value - tl.sum(key[:, None] * state, 0))
        state += key[:, None] * value[None, :]
        query = row_of(call.query, who, token, channels, call.tile.key_size)
        out = tl.sum(query[:, None] * state, 0)
        at = start_of(call.out, who[0], who[1]) + token * call.out.row + columns
        tl.store(at, out.to(call.out.data.dtype.element_ty), mask=columns < call.tile.value_size)
    write_part(call.after, who, channels, call.tile.key_size, columns, call.tile.value_size, state)


@triton.jit
def row_of(view, who, token, columns, size: tl.constexpr):
    """Load one row [columns] in float32, with zeros behind `size`."""
    at = start_of(view, who[0], who[1]) + token * view.row + columns
    return tl.load(at, mask=columns < size, other=0.0).to(tl.float32)
