"""The kernel for a decode step of linear recurrences: one token per request, with states updated in place in slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of
from attn_kernels_triton.kernels.gated_norm import GatedNorm, write_output
from attn_kernels_triton.kernels.recurrent_gates import (
    DecayRows,
    decay_factor_of,
    elu_plus_one,
    silu,
    step_size_of,
    unit,
)
from attn_kernels_triton.kernels.short_convolution import Convolution, convolve, store_tail


class StepRotary(NamedTuple):
    """Cosines and sines [request, size] of rotary embedding, with the request stride; the sine of the first element of
    a pair is negative. Constants: the number of rotated elements (`size`), and whether pairs are `neighbours` rather
    than halves. All fields are None without rotary embedding."""

    cosines: Any
    sines: Any
    row: Any
    size: Any
    neighbours: Any


class StepTile(NamedTuple):
    """Compile-time constants: sizes of keys and values, the power of two that holds the keys, the `columns` of values
    per program and the number of such `parts`; the number of heads that share queries and keys (`heads_per_key`); and
    the features to compute, see `attn_core.kernels.recurrent_step.RecurrentStepSpec`."""

    key_size: Any
    value_size: Any
    key_width: Any
    columns: Any
    parts: Any
    heads_per_key: Any
    feature_map: Any
    unit: Any
    step_size: Any
    delta_rule: Any


class Step(NamedTuple):
    """The argument of the kernel: `query`, `key` [request, key head, key size] and `value` [request, head, value size];
    the `state` [slot, channel, head, column], float32; `slots` [request], int64; `strength` [request, head], its
    last axis contiguous, and `skip` [head], both None if absent.

    All fields of `convolution` are None unless this kernel convolves queries, keys and values itself, for which each
    program must own whole heads. The sums are written to `total` [request, head, column], float32, with the divisor
    behind the values if `normalizer_eps` is given; if `total` is `NO_ROWS`, `output` is applied to groups of one head
    instead.
    """

    query: Rows
    key: Rows
    value: Rows
    state: Rows
    slots: Any
    convolution: Convolution
    rotary: StepRotary
    decay: DecayRows
    strength: Any
    strength_row: Any
    skip: Any
    query_scale: Any
    key_scale: Any
    normalizer_eps: Any
    total: Rows
    output: GatedNorm
    heads: Any
    tile: StepTile


@triton.jit
def step_heads(call):
    """Update the state of one head and read it with the query. Grid: parts of the values, for each head of each
    request."""
    part = tl.program_id(0) % call.tile.parts
    head = tl.program_id(0) // call.tile.parts % call.heads
    request = tl.program_id(0) // call.tile.parts // call.heads
    slot = tl.load(call.slots + request)
    who = (request, slot, head)
    channels = tl.arange(0, call.tile.key_width)
    columns = part * call.tile.columns + tl.arange(0, call.tile.columns)
    row, next_tail = load_inputs(call, who, channels, columns)
    where = start_of(call.state, slot, head) + channels[:, None] * call.state.row + columns[None, :]
    inside = (channels < call.tile.key_size)[:, None] & (columns < call.tile.value_size)[None, :]
    state, out = update_state(call, who, tl.load(where, mask=inside, other=0.0), row, channels)
    if call.skip is not None:
        out += tl.load(call.skip + head).to(tl.float32) * row[2]
    weight = 1.0
    if call.normalizer_eps is not None:
        weight = add_to_normalizer(call, who, part, row, channels)
    # Several threads may hold the same elements: all must have read before any of them writes.
    tl.debug_barrier()
    tl.store(where, state, mask=inside)
    if call.convolution.weight is not None:
        store_head_tails(call, who, next_tail, channels, columns)
    if call.total.data is None:
        if call.normalizer_eps is not None:
            out /= weight + call.normalizer_eps
        write_output(call.output, out, request, head, columns)
    else:
        tl.store(start_of(call.total, request, head) + columns, out, mask=columns < call.tile.value_size)
        if call.normalizer_eps is not None:
            tl.store(start_of(call.total, request, head) + call.tile.value_size, weight, mask=part == 0)


@triton.jit
def load_inputs(call, who, channels, columns):
    """The features of the query, the key and the value of a head in float32, zero behind their sizes, and the inputs
    that the convolution caches of each."""
    size: tl.constexpr = call.tile.key_size
    width: tl.constexpr = call.tile.value_size
    shared = who[2] // call.tile.heads_per_key
    queries = start_of(call.query, who[0], shared) + channels
    keys = start_of(call.key, who[0], shared) + channels
    values = start_of(call.value, who[0], who[2]) + columns
    inside, inner = channels < size, columns < width
    if call.convolution.weight is not None:
        at, slot = who[2] * size + channels, who[1]
        query, query_tail = convolve(call.convolution, queries, slot, call.convolution.query + at, inside)
        key, key_tail = convolve(call.convolution, keys, slot, call.convolution.key + at, inside)
        at = call.convolution.value + who[2] * width + columns
        value, value_tail = convolve(call.convolution, values, slot, at, inner)
        next_tail = (query_tail, key_tail, value_tail)
    else:
        query = tl.load(queries, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(keys, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values, mask=inner, other=0.0).to(tl.float32)
        next_tail = (0.0, 0.0, 0.0)
    if call.tile.feature_map == "silu":
        query, key, value = silu(query), silu(key), silu(value)
    if call.tile.feature_map == "elu_plus_one":
        query, key = elu_plus_one(query, inside), elu_plus_one(key, inside)
    if call.rotary.cosines is not None:
        query = rotated(call.rotary, call.query, query, who[0], shared, channels)
        key = rotated(call.rotary, call.key, key, who[0], shared, channels)
    if call.tile.unit:
        query, key = unit(query), unit(key)
    return (query * call.query_scale, key * call.key_scale, value), next_tail


@triton.jit
def rotated(rotary, view, rows, request, head, channels):
    """The row with rotary embedding applied; the partner element of each pair is read from memory again."""
    inside = channels < rotary.size
    partner = (channels + rotary.size // 2) % rotary.size
    if rotary.neighbours:
        partner = channels ^ 1
    other = tl.load(start_of(view, request, head) + partner, mask=inside, other=0.0).to(tl.float32)
    at = tl.cast(request, tl.int64) * rotary.row + channels
    cosines = tl.load(rotary.cosines + at, mask=inside, other=1.0)
    sines = tl.load(rotary.sines + at, mask=inside, other=0.0)
    return rows * cosines + other * sines


@triton.jit
def update_state(call, who, state, row, channels):
    """The state [channels, columns] after the token, and what its query reads from it, [columns]."""
    query, key, value = row
    if call.decay.rows.data is not None:
        factor = decay_factor_of(call.decay, who[0], who[2], channels, call.tile.key_size)
        if call.decay.channels:
            state *= factor[:, None]
        else:
            state *= factor
    if call.tile.step_size:
        value *= step_size_of(call.decay, who[0], who[2])
    if call.tile.delta_rule:
        at = call.strength + tl.cast(who[0], tl.int64) * call.strength_row + who[2]
        strength = tl.sigmoid(tl.load(at).to(tl.float32))
        value = strength * (value - tl.sum(key[:, None] * state, 0))
    state += key[:, None] * value[None, :]
    return state, tl.sum(query[:, None] * state, 0)


@triton.jit
def add_to_normalizer(call, who, part, row, channels):
    """Add a key to the sum of keys, in the state's column behind the values, and return its product with the query.

    Only the first part of a head updates the column; the result of other parts is not used.
    """
    query, key, _ = row
    at = start_of(call.state, who[1], who[2]) + channels * call.state.row + call.tile.value_size
    inside = channels < tl.where(part == 0, call.tile.key_size, 0)
    total = tl.load(at, mask=inside, other=0.0)
    if call.decay.rows.data is not None:
        total *= decay_factor_of(call.decay, who[0], who[2], channels, call.tile.key_size)
    total += key
    tl.debug_barrier()
    tl.store(at, total, mask=inside)
    return tl.sum(query * total, 0)


@triton.jit
def store_head_tails(call, who, next_tail, channels, columns):
    """Cache the inputs of a head's query, key and value for the convolutions of later tokens."""
    inside, at = channels < call.tile.key_size, who[2] * call.tile.key_size + channels
    store_tail(call.convolution, next_tail[0], who[1], call.convolution.query + at, inside)
    store_tail(call.convolution, next_tail[1], who[1], call.convolution.key + at, inside)
    at = call.convolution.value + who[2] * call.tile.value_size + columns
    store_tail(call.convolution, next_tail[2], who[1], at, columns < call.tile.value_size)
