"""The gradient to learned biases: which diagonals of tiles there are, and what becomes of their sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.texts import whole_texts
from attn_kernels_triton.attention.tiles import choice_of, tile_of
from attn_kernels_triton.kernels.arguments import Backward, Diagonals
from attn_kernels_triton.kernels.backward_bias import gradient_to_biases
from attn_kernels_triton.launch import Launch

SLICES = 8
"""Sums of a diagonal that are kept apart, so that more programs work on them."""


class Extent(NamedTuple):
    """Diagonals that are seen, from `first` to `stop`, and with biases that differ, from `near` to `near_stop`."""

    first: int
    stop: int
    near: int
    near_stop: int


def extent_of(plan: Plan, far: int, side: int) -> Extent:
    """The diagonals of tiles of this side, where biases differ for distances below `far`."""
    # Distances key - query from -before to after occur; a tile of diagonal d has those within side - 1 of d side.
    before, after = max(plan.sizes.keys - 1, 0), max(plan.sizes.queries - 1, 0)
    if plan.rule.left is not None:
        before = min(before, plan.rule.left)
    if plan.rule.right is not None:
        after = min(after, plan.rule.right)
    first, stop = -((before + side - 1) // side), (after + side - 1) // side + 1
    reach = (far + side - 1) // side
    return Extent(first, stop, max(first, min(-reach, stop)), min(stop, max(reach + 1, first)))


def bias_launch(plan: Plan, backward: Backward, far: int) -> tuple[Launch, Extent]:
    """The program that sums by diagonals, with its extent; `backward` is what backward programs are given."""
    choice = choice_of("to_biases", plan.sizes)
    side = max(choice.queries, choice.keys)
    choice = choice._replace(queries=side, keys=side)
    extent, device, heads = extent_of(plan, far, side), backward.delta.device, plan.shape.heads
    number = plan.batch if plan.texts is None else len(plan.texts)
    slices = max(1, min(SLICES, number))
    count, near = extent.stop - extent.first, extent.near_stop - extent.near
    texts = None if plan.texts is None else whole_texts(plan.texts, device)
    diagonals = Diagonals(
        first=extent.first,
        count=count,
        near=extent.near,
        near_stop=extent.near_stop,
        number=number,
        slices=slices,
        sums=torch.empty(slices, heads, near, side, side, device=device),
        far=torch.zeros(slices, heads, count, device=device),
    )
    tile = tile_of(choice, plan.sizes)
    call = backward._replace(blocks=plan.by_pair, tile=tile, texts=texts, diagonals=diagonals)
    programs = slices * heads * count if number else 0
    launch = Launch(program=gradient_to_biases, programs=programs, call=call, warps=choice.warps, stages=choice.stages)
    return launch, extent


def to_bias(found: Diagonals, extent: Extent, far: int) -> Tensor:
    """The gradient [heads, 2 far + 1] of what the program has summed."""
    sums, rest = found.sums.sum(0), found.far.sum(0)
    heads, near, side, _ = sums.shape
    # Rows of a tile, read one after the other as if each were one shorter, move by one: columns are distances then.
    wide = torch.nn.functional.pad(sums.flip(2), (0, side)).flatten(2)[..., : side * (2 * side - 1)]
    by_distance = wide.reshape(heads, near, side, 2 * side - 1).sum(2)
    least = min(-far, extent.near * side - (side - 1))
    line = rest.new_zeros(heads, max(far, extent.near_stop * side) - least + 1)
    for place in range(near):
        start = (extent.near + place) * side - (side - 1) - least
        line[:, start : start + 2 * side - 1] += by_distance[:, place]
    total: Tensor = line[:, -far - least : far - least + 1].clone()
    total[:, 0] += line[:, : -far - least].sum(1) + rest[:, : extent.near - extent.first].sum(1)
    total[:, -1] += line[:, far - least + 1 :].sum(1) + rest[:, extent.near_stop - extent.first :].sum(1)
    return total
