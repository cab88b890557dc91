"""Attention of one new token of each request to a paged KV cache, for steps that are recorded once and repeated.

How many programs there are depends on the number of requests alone; which keys each of them meets follows from lengths
that lie on the device. Splits of a request write partial outputs and lse, which a second kernel merges (Dao et al.
2023, "Flash-Decoding").
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_kernels_triton.kernels.paged import finish, meet, read_query, rows_of


@triton.jit
def range_of(call, request):
    """The first and the last (exclusive) key that a request's newest token may see, and the keys of a split."""
    stop = tl.load(call.ends + request).to(tl.int32)
    start = tl.load(call.firsts + request).to(tl.int32)
    if call.rule.left is not None:
        start = tl.maximum(start, stop - 1 - call.rule.left)
    share = tl.cdiv(stop - start, call.splits)
    return start, stop, tl.cdiv(share, call.tile.keys) * call.tile.keys


@triton.jit
def decode_paged(call):
    """Grid: requests, splits, tiles of the heads that share keys, key/value heads."""
    owners = call.heads // call.group
    tiles = tl.cdiv(call.group, call.tile.rows)
    owner = tl.program_id(0) % owners
    part = tl.program_id(0) // owners % tiles
    split = tl.program_id(0) // owners // tiles % call.splits
    request = tl.program_id(0) // owners // tiles // call.splits
    first = part * call.tile.rows
    token, head, real = rows_of(call, owner, request, first, tl.minimum(call.group - first, call.tile.rows))
    start, end, share = range_of(call, request)
    begin = start + split * share
    stop = tl.minimum(end, begin + share)
    if (begin < stop) | (call.splits == 1):
        at = tl.load(call.positions + token).to(tl.int32)
        query = read_query(call, token, head, real, 0, call.tile.key_size, call.tile.key_width)
        rest = query
        if call.rest.data is not None:
            rest = read_query(call, token, head, real, call.tile.key_size, call.tile.rest_size, call.tile.rest_width)
        # A block's number stands at its place behind the first block of the request.
        numbers = call.numbers + tl.cast(request, tl.int64) * call.stride
        numbers = numbers - tl.load(call.firsts + request).to(tl.int32) // call.block
        here = (query, rest, head, at, owner, numbers, stop, (token, request, request))
        summed = tl.zeros([call.tile.rows, call.tile.value_width], tl.float32)
        total = tl.zeros([call.tile.rows], tl.float32)
        top = tl.full([call.tile.rows], float("-inf"), tl.float32)
        running = (summed, total, top)
        for step in range(tl.cdiv(stop - begin, call.tile.keys)):
            running = meet(call, here, running, begin + step * call.tile.keys)
        summed, total, top = running
        if call.splits == 1:
            finish(call, (token, head, real), summed, total, top)
        else:
            row = tl.arange(0, call.tile.rows)
            place = tl.cast(((request * tiles + part) * owners + owner) * call.splits + split, tl.int64)
            place = place * call.tile.rows + row
            across = tl.arange(0, call.tile.value_width)
            out = summed / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(call.sums + place[:, None] * call.tile.value_width + across[None, :], out, mask=real[:, None])
            tl.store(call.lse + place, top + tl.log2(total), mask=real)


@triton.jit
def merge_decode(call):
    """Grid: requests, tiles of the heads that share keys, key/value heads; the sums of all splits, by their shares."""
    owners = call.heads // call.group
    tiles = tl.cdiv(call.group, call.tile.rows)
    owner = tl.program_id(0) % owners
    part = tl.program_id(0) // owners % tiles
    request = tl.program_id(0) // owners // tiles
    first = part * call.tile.rows
    token, head, real = rows_of(call, owner, request, first, tl.minimum(call.group - first, call.tile.rows))
    start, stop, share = range_of(call, request)
    across = tl.arange(0, call.tile.value_width)
    summed = tl.zeros([call.tile.rows, call.tile.value_width], tl.float32)
    total = tl.zeros([call.tile.rows], tl.float32)
    top = tl.full([call.tile.rows], float("-inf"), tl.float32)
    before = tl.cast(((request * tiles + part) * owners + owner) * call.splits, tl.int64)
    for split in range(tl.cdiv(stop - start, share)):
        place = (before + split) * call.tile.rows + tl.arange(0, call.tile.rows)
        lse = tl.load(call.lse + place, mask=real, other=float("-inf"))
        highest = tl.maximum(top, lse)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        faded, weight = tl.exp2(top - base), tl.exp2(lse - base)
        sums = tl.load(
            call.sums + place[:, None] * call.tile.value_width + across[None, :], mask=real[:, None], other=0.0
        )
        summed = summed * faded[:, None] + sums * weight[:, None]
        total = total * faded + weight
        top = highest
    finish(call, (token, head, real), summed, total, top)
