"""Launching the backward programs of bands whose tiles the chip copies."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_kernels_triton.attention.dense import described
from attn_kernels_triton.attention.gradients import Backwards, call_of
from attn_kernels_triton.attention.parts import parts_of
from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import Choice, tile_of
from attn_kernels_triton.kernels.arguments import Backward, Padded, Parts
from attn_kernels_triton.kernels.dense_backward import gradient_to_dense_keys, gradient_to_dense_queries, pad
from attn_kernels_triton.kernels.joined import gradients_joined, join
from attn_kernels_triton.launch import Launch, rows

PADDED = 128
"""Of how many rows what is kept of queries is a multiple: whole tiles of every program."""
FIRSTS = 4
"""Numbers from one launch's first to the next one's, so that each lies where Triton takes it for the same."""


class Dense(NamedTuple):
    """A backward pass, and what its programs read of each query: `lse` and `delta` [head of all batches, row]."""

    plan: Plan
    work: Backwards
    lse: Tensor
    delta: Tensor

    @property
    def call(self) -> Backward:
        """What all programs are given."""
        return call_of(self.plan, self.work)._replace(padded=Padded(self.lse, self.delta, self.lse.shape[1]))

    def tiles(self, choice: Choice) -> tuple[TensorDescriptor, ...]:
        """Descriptors of queries, the gradient to the output, lse, delta, keys and values."""
        inputs = self.work.inputs
        lines = (TensorDescriptor.from_tensor(line, [1, choice.queries]) for line in (self.lse, self.delta))
        asked = described(inputs.query, choice.queries), described(self.work.change, choice.queries)
        return *asked, *lines, described(inputs.key, choice.keys), described(inputs.value, choice.keys)


def dense_launches(plan: Plan, work: Backwards, choices: tuple[Choice, ...]) -> list[Launch]:
    """The programs in the order in which they run: of one choice where gradients are joined, else of one for queries
    and one for keys. The first writes `delta`."""
    batch, heads, queries = work.result.lse.shape
    kept = work.result.lse.new_empty(2, batch * heads, -(-queries // PADDED) * PADDED)
    dense = Dense(plan, work, kept[0], kept[1])
    if choices[0].schedule == "joined":
        return [pad_launch(dense), *joined_launches(dense, choices[0])]
    by_query, by_key = choices
    return [pad_launch(dense), query_launch(dense, by_query), key_launch(dense, by_key)]


def pad_launch(dense: Dense) -> Launch:
    """The program that keeps what the others read of each query; it owns whole tiles of `PADDED` rows."""
    tile = tile_of(Choice(PADDED, PADDED, 8, 1), dense.plan.sizes)
    call = dense.call._replace(second=rows(dense.work.result.out), tile=tile)
    count = dense.lse.numel() // PADDED
    return Launch(program=pad, programs=count, call=call, warps=8, stages=1)


def query_launch(dense: Dense, choice: Choice) -> Launch:
    """The program that owns queries."""
    call = dense.call._replace(first=rows(dense.work.gradients.query), tile=tile_of(choice, dense.plan.sizes))
    count = -(-dense.plan.shape.queries // choice.queries) * dense.plan.batch * dense.plan.shape.heads
    return launched(gradient_to_dense_queries, count, call, dense, choice)


def key_launch(dense: Dense, choice: Choice) -> Launch:
    """The program that owns keys."""
    shape = dense.plan.shape
    count = -(-shape.keys // choice.keys) * dense.plan.batch * (shape.heads // shape.group)
    return launched(gradient_to_dense_keys, count, to_keys(dense, choice), dense, choice)


def joined_launches(dense: Dense, choice: Choice) -> list[Launch]:
    """One launch for each tile of keys of every part, then one that adds the parts."""
    plan, shape, device = dense.plan, dense.plan.shape, dense.lse.device
    owners, tiles = plan.batch * shape.heads // shape.group, -(-shape.keys // choice.keys)
    count = parts_of(plan, tiles, device).number
    call = to_keys(dense, choice)
    # Room for two heads at least: a number that is 1 would be a constant, which Triton 3.6 loses inside of loops.
    heads = max(2, dense.lse.shape[0])
    sums = dense.lse.new_zeros(count, heads, dense.lse.shape[1], call.tile.key_width.value)
    firsts = torch.full((-(-tiles // count), FIRSTS), shape.group, dtype=torch.int32, device=device)
    firsts[:, 0] = torch.arange(0, tiles, count, device=device)
    parts = Parts(sums, tl.constexpr(count), heads, firsts, tl.constexpr(1) if shape.keys % choice.keys else None)
    found = [
        launched(gradients_joined, count * owners, call._replace(parts=parts._replace(first=first)), dense, choice)
        for first in firsts
    ]
    tile = tile_of(choice, plan.sizes)
    last = dense.call._replace(first=rows(dense.work.gradients.query), parts=parts, tile=tile)
    programs = -(-shape.queries // choice.queries) * dense.lse.shape[0]
    return [*found, Launch(program=join, programs=programs, call=last, warps=choice.warps, stages=1)]


def to_keys(dense: Dense, choice: Choice) -> Backward:
    """What programs are given that write gradients to keys and values."""
    found = dense.work.gradients
    return dense.call._replace(first=rows(found.key), second=rows(found.value), tile=tile_of(choice, dense.plan.sizes))


def launched(program: object, count: int, call: Backward, dense: Dense, choice: Choice) -> Launch:
    """A program over descriptors."""
    tiles = dense.tiles(choice)
    return Launch(program=program, programs=count, call=call, warps=choice.warps, stages=choice.stages, tiles=tiles)
