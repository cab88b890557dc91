"""The program that goes token by token, with what a head remembers of some columns of the values in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rows import start_of
from attn_kernels_triton.kernels.scan.rows import LOG2_E, read_memory, write_part


@triton.jit
def go_through(call):
    """Outputs and the memory after the last token. Grid: parts of the values of heads."""
    head = tl.program_id(0) // call.tile.value_parts
    who = (head // call.heads, head % call.heads)
    channels = tl.arange(0, call.tile.key_width)
    columns = tl.program_id(0) % call.tile.value_parts * call.tile.values_at_once + tl.arange(
        0, call.tile.values_at_once
    )
    memory = tl.zeros([call.tile.key_width, call.tile.values_at_once], tl.float32)
    if call.before.data is not None:
        memory += read_memory(call.before, who, channels, columns, call.tile)
    for token in range(call.tokens):
        key = row_of(call.key, who, token, channels, call.tile.key_size)
        value = row_of(call.value, who, token, columns, call.tile.value_size)
        if call.decay.data is not None:
            if call.tile.channels:
                left = row_of(call.decay, who, token, channels, call.tile.key_size)
                memory *= tl.exp2(left * LOG2_E)[:, None]
            else:
                left = tl.load(start_of(call.decay, who[0], who[1]) + token * call.decay.row).to(tl.float32)
                memory *= tl.exp2(left * LOG2_E)
        if call.strength.data is not None:
            strength = tl.load(start_of(call.strength, who[0], who[1]) + token * call.strength.row).to(tl.float32)
            value = strength * (value - tl.sum(key[:, None] * memory, 0))
        memory += key[:, None] * value[None, :]
        query = row_of(call.query, who, token, channels, call.tile.key_size)
        out = tl.sum(query[:, None] * memory, 0)
        at = start_of(call.out, who[0], who[1]) + token * call.out.row + columns
        tl.store(at, out.to(call.out.data.dtype.element_ty), mask=columns < call.tile.value_size)
    write_part(call.after, who, channels, call.tile.key_size, columns, call.tile.value_size, memory)


@triton.jit
def row_of(view, who, token, columns, size: tl.constexpr):
    """One row [columns] in float32, zeros behind `size`."""
    at = start_of(view, who[0], who[1]) + token * view.row + columns
    return tl.load(at, mask=columns < size, other=0.0).to(tl.float32)
