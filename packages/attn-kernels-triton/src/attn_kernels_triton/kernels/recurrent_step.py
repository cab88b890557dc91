"""A decode step of linear recurrences: one token of each request, whose memories lie in slots and stay there."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of
from attn_kernels_triton.kernels.gated_norm import GatedNorm, write_output
from attn_kernels_triton.kernels.recurrent_gates import (
    Decaying,
    elu_plus_one,
    left_of,
    silu,
    step_size_of,
    unit,
)
from attn_kernels_triton.kernels.short_convolution import Convolution, convolved, remember


class StepTurn(NamedTuple):
    """Cosines and sines [request, size] of rotary positions, that of the first of a pair negative, with the stride of
    requests; constants: how many elements turn, and whether `neighbours` are pairs, not halves. None where nothing
    turns."""

    cosines: Any
    sines: Any
    row: Any
    size: Any
    neighbours: Any


class StepTile(NamedTuple):
    """Constants: sizes of keys and values, the power of two that holds the keys, `columns` of values that a program
    takes, and how many `parts` these are; how many heads `share` queries and keys; and what is computed, as of
    `attn_core.kernels.recurrent_step.RecurrentStepSpec`."""

    key_size: Any
    value_size: Any
    key_width: Any
    columns: Any
    parts: Any
    share: Any
    feature_map: Any
    unit: Any
    step_size: Any
    delta_rule: Any


class Step(NamedTuple):
    """Everything for the program: `query`, `key` [request, head of keys, key] and `value` [request, head, value];
    `memory` [slot, channel, head, column], float32; `slots` [request], int64; `strength` [request, head], its last axis
    dense, and `skip` [head], None where there is none.

    `convolution` is None but where the program convolves queries, keys and values itself, for which it must own whole
    heads. Sums go to `total` [request, head, column], float32, those of `normalizer_eps` behind the values, or, where
    that is `NO_ROWS`, through `output`, of groups of one head.
    """

    query: Rows
    key: Rows
    value: Rows
    memory: Rows
    slots: Any
    convolution: Convolution
    turn: StepTurn
    decaying: Decaying
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
    """Grid: parts of the values of heads of requests."""
    part = tl.program_id(0) % call.tile.parts
    head = tl.program_id(0) // call.tile.parts % call.heads
    request = tl.program_id(0) // call.tile.parts // call.heads
    slot = tl.load(call.slots + request)
    who = (request, slot, head)
    channels = tl.arange(0, call.tile.key_width)
    columns = part * call.tile.columns + tl.arange(0, call.tile.columns)
    row, kept = entering(call, who, channels, columns)
    where = start_of(call.memory, slot, head) + channels[:, None] * call.memory.row + columns[None, :]
    inside = (channels < call.tile.key_size)[:, None] & (columns < call.tile.value_size)[None, :]
    memory, out = updated(call, who, tl.load(where, mask=inside, other=0.0), row, channels)
    if call.skip is not None:
        out += tl.load(call.skip + head).to(tl.float32) * row[2]
    weight = 1.0
    if call.normalizer_eps is not None:
        weight = add_key(call, who, part, row, channels)
    # Some threads hold the same numbers: all have read before one writes.
    tl.debug_barrier()
    tl.store(where, memory, mask=inside)
    if call.convolution.weight is not None:
        remember_head(call, who, kept, channels, columns)
    if call.total.data is None:
        if call.normalizer_eps is not None:
            out /= weight + call.normalizer_eps
        write_output(call.output, out, request, head, columns)
    else:
        tl.store(start_of(call.total, request, head) + columns, out, mask=columns < call.tile.value_size)
        if call.normalizer_eps is not None:
            tl.store(start_of(call.total, request, head) + call.tile.value_size, weight, mask=part == 0)


@triton.jit
def entering(call, who, channels, columns):
    """Features of the query, the key and the value of a head in float32, zero behind their sizes, and what a
    convolution keeps of each."""
    size: tl.constexpr = call.tile.key_size
    width: tl.constexpr = call.tile.value_size
    shared = who[2] // call.tile.share
    queries = start_of(call.query, who[0], shared) + channels
    keys = start_of(call.key, who[0], shared) + channels
    values = start_of(call.value, who[0], who[2]) + columns
    inside, inner = channels < size, columns < width
    if call.convolution.weight is not None:
        at, slot = who[2] * size + channels, who[1]
        query, kept_query = convolved(call.convolution, queries, slot, call.convolution.query + at, inside)
        key, kept_key = convolved(call.convolution, keys, slot, call.convolution.key + at, inside)
        at = call.convolution.value + who[2] * width + columns
        value, kept_value = convolved(call.convolution, values, slot, at, inner)
        kept = (kept_query, kept_key, kept_value)
    else:
        query = tl.load(queries, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(keys, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values, mask=inner, other=0.0).to(tl.float32)
        kept = (0.0, 0.0, 0.0)
    if call.tile.feature_map == "silu":
        query, key, value = silu(query), silu(key), silu(value)
    if call.tile.feature_map == "elu_plus_one":
        query, key = elu_plus_one(query, inside), elu_plus_one(key, inside)
    if call.turn.cosines is not None:
        query = turned(call.turn, call.query, query, who[0], shared, channels)
        key = turned(call.turn, call.key, key, who[0], shared, channels)
    if call.tile.unit:
        query, key = unit(query), unit(key)
    return (query * call.query_scale, key * call.key_scale, value), kept


@triton.jit
def turned(turn, view, rows, request, head, channels):
    """A row turned to its position; the other element of each pair is read once more."""
    inside = channels < turn.size
    partner = (channels + turn.size // 2) % turn.size
    if turn.neighbours:
        partner = channels ^ 1
    other = tl.load(start_of(view, request, head) + partner, mask=inside, other=0.0).to(tl.float32)
    at = tl.cast(request, tl.int64) * turn.row + channels
    cosines = tl.load(turn.cosines + at, mask=inside, other=1.0)
    sines = tl.load(turn.sines + at, mask=inside, other=0.0)
    return rows * cosines + other * sines


@triton.jit
def updated(call, who, memory, row, channels):
    """The memory [channels, columns] after the token, and what its query then reads, [columns]."""
    query, key, value = row
    if call.decaying.rows.data is not None:
        left = left_of(call.decaying, who[0], who[2], channels, call.tile.key_size)
        if call.decaying.channels:
            memory *= left[:, None]
        else:
            memory *= left
    if call.tile.step_size:
        value *= step_size_of(call.decaying, who[0], who[2])
    if call.tile.delta_rule:
        at = call.strength + tl.cast(who[0], tl.int64) * call.strength_row + who[2]
        strength = tl.sigmoid(tl.load(at).to(tl.float32))
        value = strength * (value - tl.sum(key[:, None] * memory, 0))
    memory += key[:, None] * value[None, :]
    return memory, tl.sum(query[:, None] * memory, 0)


@triton.jit
def add_key(call, who, part, row, channels):
    """Add a key to the sum of keys, the column behind the values, and give its product with the query.

    The first part of a head does so; to others it means nothing.
    """
    query, key, _ = row
    at = start_of(call.memory, who[1], who[2]) + channels * call.memory.row + call.tile.value_size
    inside = channels < tl.where(part == 0, call.tile.key_size, 0)
    total = tl.load(at, mask=inside, other=0.0)
    if call.decaying.rows.data is not None:
        total *= left_of(call.decaying, who[0], who[2], channels, call.tile.key_size)
    total += key
    tl.debug_barrier()
    tl.store(at, total, mask=inside)
    return tl.sum(query * total, 0)


@triton.jit
def remember_head(call, who, kept, channels, columns):
    """Keep the query, the key and the value of a head for the convolutions of later tokens."""
    inside, at = channels < call.tile.key_size, who[2] * call.tile.key_size + channels
    remember(call.convolution, kept[0], who[1], call.convolution.query + at, inside)
    remember(call.convolution, kept[1], who[1], call.convolution.key + at, inside)
    at = call.convolution.value + who[2] * call.tile.value_size + columns
    remember(call.convolution, kept[2], who[1], at, columns < call.tile.value_size)
