"""Pairs of elements turned by the angle of their token, or turned back, which is the gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.rows import start_of


@triton.jit
def rotate_rows(call):
    """Turn some tokens of some heads. Grid: groups of heads of blocks of tokens of sequences."""
    groups = tl.cdiv(call.heads, call.tile.heads)
    blocks = tl.cdiv(call.tokens, call.tile.tokens)
    place = tl.program_id(0) // groups
    batch, first = place // blocks, tl.program_id(0) % groups * call.tile.heads
    tokens = place % blocks * call.tile.tokens + tl.arange(0, call.tile.tokens)
    pairs = tl.arange(0, call.tile.width)
    cosines, sines = turns_of(call, batch, tokens, pairs)
    for number in tl.static_range(call.tile.heads):
        head = first + number
        real = (tokens < tl.where(head < call.heads, call.tokens, 0))[:, None]
        source = start_of(call.rows, batch, head) + tokens.to(tl.int64)[:, None] * call.rows.row
        target = start_of(call.out, batch, head) + tokens.to(tl.int64)[:, None] * call.out.row
        if call.tile.interleaved:
            turn_neighbours(source, target, cosines, sines, real, call.tile)
        else:
            turn_halves(source, target, cosines, sines, real, call.tile)
        if call.tile.rest > 0:
            across = 2 * call.tile.pairs + tl.arange(0, call.tile.rest)[None, :]
            inside = real & (across < call.tile.size)
            tl.store(target + across, tl.load(source + across, mask=inside), mask=inside)


@triton.jit
def turns_of(call, batch, tokens, pairs):
    """Cosines and sines [tokens, pairs] of the angles; the sine that is kept of a pair's second element is positive."""
    at = tl.cast(batch, tl.int64) * call.turn.batch + tokens.to(tl.int64)[:, None] * call.turn.row
    if call.tile.interleaved:
        real = (tokens < call.tokens)[:, None]
        cosines, _ = read_neighbours(call.turn.cosines + at, real, call.tile)
        _, sines = read_neighbours(call.turn.sines + at, real, call.tile)
    else:
        known = (tokens < call.tokens)[:, None] & (pairs < call.tile.pairs)[None, :]
        cosines = tl.load(call.turn.cosines + at + pairs[None, :], mask=known, other=0.0)
        sines = tl.load(call.turn.sines + at + call.tile.pairs + pairs[None, :], mask=known, other=0.0)
    return cosines, -sines if call.tile.back else sines


@triton.jit
def turn_halves(source, target, cosines, sines, real, tile):
    """Elements p and p + half of each row."""
    near = tl.arange(0, tile.width)[None, :]
    inside = real & (near < tile.pairs)
    x = tl.load(source + near, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + tile.pairs + near, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + near, (x * cosines - y * sines).to(target.dtype.element_ty), mask=inside)
    tl.store(target + tile.pairs + near, (y * cosines + x * sines).to(target.dtype.element_ty), mask=inside)


@triton.jit
def turn_neighbours(source, target, cosines, sines, real, tile):
    """Elements 2p and 2p + 1 of each row."""
    x, y = read_neighbours(source, real, tile)
    turned = tl.reshape(tl.join(x * cosines - y * sines, y * cosines + x * sines), [tile.tokens, 2 * tile.width])
    across = tl.arange(0, 2 * tile.width)[None, :]
    inside = real & (across < 2 * tile.pairs)
    tl.store(target + across, turned.to(target.dtype.element_ty), mask=inside)


@triton.jit
def read_neighbours(source, real, tile):
    """Elements 2p and elements 2p + 1 in float32, read side by side."""
    across = tl.arange(0, 2 * tile.width)[None, :]
    both = tl.load(source + across, mask=real & (across < 2 * tile.pairs), other=0.0).to(tl.float32)
    return tl.split(tl.reshape(both, [tile.tokens, tile.width, 2]))
