"""Attention to selected blocks in PyTorch: in tiles of the queries that selected a block, or block by block.

The queries that selected a block are gathered in tiles, so that the keys of a block are read once per tile. For whole
sequences without gradients, each block is computed with all of its queries at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks
from attn_core.masking import LOWEST
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TILE = 64
"""The largest number of queries in a tile."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """The assignment of queries to tiles, each of which reads one block of keys.

    A lane is one key/value group of one sequence; queries and blocks are numbered consecutively over all lanes.
    `blocks` [tile] is the block of each tile, `queries` [tile, within] are its queries (arbitrary where a tile is not
    full). `slots` [lane, query, top] is the index of each selection among tiles x within; `real`, of the same shape, is
    False for selections of no block.
    """

    blocks: Tensor
    queries: Tensor
    slots: Tensor
    real: Tensor


def attend_in_tiles(query: Tensor, chosen: Tensor, places: Tensor, blocks: KeyBlocks, tile: int = TILE) -> Tensor:
    """Outputs [batch, groups, query, shared, value_size], as returned by `SelectedBlocksKernel.run`.

    Tiles have `tile` queries; it need not exceed the number of queries.
    """
    batch, groups, queries, shared, size = query.shape
    tiles = tiled(chosen.flatten(0, 1), blocks.key.shape[2], tile)
    rows = query.reshape(batch * groups * queries, shared * size).index_select(0, tiles.queries.flatten())
    rows = rows.reshape(tiles.queries.shape[0], tile * shared, size)
    scores = rows @ blocks.key.flatten(0, 2).index_select(0, tiles.blocks).transpose(-1, -2)
    allowed = seen(tiles, places, blocks, groups)
    scores = scores.reshape(*tiles.queries.shape, shared, blocks.key.shape[3])
    scores = scores.masked_fill(~allowed[:, :, None], LOWEST)
    most = scores.detach().amax(-1)
    powers = (scores - most[..., None]).exp()
    sums = powers.sum(-1)
    values = blocks.value.flatten(0, 2).index_select(0, tiles.blocks)
    found = powers.flatten(1, 2) @ values
    parts = found.reshape(tiles.queries.numel(), shared, values.shape[-1]), sums.flatten(0, 1), most.flatten(0, 1)
    out: Tensor = joined(parts, tiles)
    return out.reshape(batch, groups, queries, shared, values.shape[-1])


def tiles_of(queries: int, top: int, blocks: int, tile: int) -> int:
    """An upper bound of the tiles of a lane: only the last tile of a block may be partly filled, and none is empty."""
    return min(queries * top, queries * top // tile + blocks)


def tiled(chosen: Tensor, blocks: int, tile: int) -> Tiles:
    """Build tiles of `tile` queries for selections [lane, query, top] among `blocks` blocks per lane; -1 is none."""
    lanes, queries, top = chosen.shape
    real = chosen >= 0
    at = chosen.clamp(min=0)
    # Selections of no block go to an extra column after the last block, which is cut off.
    column = at + (~real) * (blocks - at)
    member = chosen.new_zeros(lanes, queries, blocks + 1).scatter(2, column, 1)[..., :blocks]
    upto = member.cumsum(1)
    full = (upto[:, -1].flatten() + (tile - 1)) // tile
    starts = full.cumsum(0) - full
    count = lanes * tiles_of(queries, top, blocks, tile)
    lane = (chosen.new_ones(lanes).cumsum(0) - 1)[:, None, None]
    slots = starts.reshape(lanes, 1, blocks).expand(-1, queries, -1).gather(2, at) * tile + upto.gather(2, at) - 1
    slots = slots * real
    number = lane * queries + (chosen.new_ones(queries).cumsum(0) - 1)[:, None]
    behind = count * tile
    targets = slots + (~real) * (behind - slots)
    owners = chosen.new_zeros(behind + 1).scatter(0, targets.flatten(), number.expand_as(slots).flatten())
    # A tile belongs to the last block that starts at or before it.
    begun = chosen.new_zeros(count + 1).scatter_add(0, starts.clamp(max=count), starts.new_ones(lanes * blocks))
    return Tiles((begun.cumsum(0) - 1)[:count], owners[:behind].reshape(count, tile), slots, real)


def seen(tiles: Tiles, places: Tensor, blocks: KeyBlocks, groups: int) -> Tensor:
    """Bool [tile, within, key], True if a query of a tile may attend to a key of its block."""
    within, count = blocks.key_padding_mask.shape[-1], blocks.key.shape[2]
    owner = places[:, None].expand(-1, groups, -1).flatten().index_select(0, tiles.queries.flatten())
    kept = blocks.key_padding_mask[:, None].expand(-1, groups, -1, -1).flatten(0, 2).index_select(0, tiles.blocks)
    key = (tiles.blocks % count)[:, None] * within + (places.new_ones(within).cumsum(0) - 1)
    allowed: Tensor = (key[:, None] <= owner.reshape_as(tiles.queries)[..., None]) & kept[:, None]
    return allowed


def joined(parts: tuple[Tensor, Tensor, Tensor], tiles: Tiles) -> Tensor:
    """Merge the partial results of all selections of each query into outputs [lane, query, shared, value_size].

    `parts` are the sums of values times exponentials [slot, shared, value_size], the sums of exponentials, and the
    largest scores, which were subtracted before (both [slot, shared]).
    """
    at = tiles.slots.flatten()
    found, sums, most = (part.index_select(0, at).reshape(*tiles.slots.shape, *part.shape[1:]) for part in parts)
    none = ~tiles.real[..., None]
    # Selections of no block read the results of another sequence, which may be NaN; multiplying by 0 would keep NaN.
    found, sums = found.masked_fill(none[..., None], 0.0), sums.masked_fill(none, 0.0)
    most = most.masked_fill(none, LOWEST)
    real = most > LOWEST
    factor = (most - most.amax(2, keepdim=True)).exp() * real
    whole = (sums * factor).sum(2)
    out: Tensor = (found * factor[..., None]).sum(2)
    return out / (whole + (whole == 0))[..., None]


PIECE = 1 << 21
"""The largest number of scores held at once, except while compiling."""


def attend_in_pieces(choices: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
    """The outputs of `SelectedBlocksKernel.run`, in pieces of up to `PIECE` scores; large pieces fill tiles better.

    The backward pass recomputes the scores, a piece at a time.
    """
    if torch.compiler.is_compiling():
        return attend_in_tiles(*choices, blocks)
    return torch.cat([torch.cat(list(pieces(*lane)), dim=2) for lane in lanes(choices, blocks)], dim=1)


def lanes(choices: SelectedBlocks, blocks: KeyBlocks) -> Iterator[tuple[SelectedBlocks, KeyBlocks, int]]:
    """Yield the inputs of some groups at a time, and the number of their queries to compute at once."""
    query, chosen, places = choices
    batch, groups, queries, shared, _ = query.shape
    each = max(1, batch * shared * chosen.shape[-1] * blocks.key_padding_mask.shape[-1])
    length = max(1, min(queries, PIECE // each))
    width = max(1, min(groups, PIECE // (each * max(1, queries))))
    for start in range(0, groups, width):
        group = slice(start, start + width)
        some = KeyBlocks(blocks.key[:, group], blocks.value[:, group], blocks.key_padding_mask)
        yield SelectedBlocks(query[:, group], chosen[:, group], places), some, length


def pieces(choices: SelectedBlocks, blocks: KeyBlocks, length: int) -> Iterator[Tensor]:
    """Yield the outputs of `length` queries at a time, with activation checkpointing."""
    run = partial(checkpoint, attend_in_tiles, use_reentrant=False)
    for first in range(0, choices.query.shape[2], length):
        rows = slice(first, first + length)
        part = choices.query[:, :, rows], choices.chosen[:, :, rows], choices.places[:, rows]
        yield run(*part, blocks, min(TILE, part[0].shape[2]))


Part = tuple[Tensor, Tensor]
"""Outputs [..., query, value_size] over some keys, and logarithms [..., query] of the sums of their exponentials."""


def attend_whole(choices: SelectedBlocks, blocks: KeyBlocks) -> Tensor:
    """The outputs of `SelectedBlocksKernel.run` for positions 0, 1, ... without padding; not differentiable."""
    query, chosen, _ = choices
    if not query.numel():
        return query.new_zeros(*query.shape[:-1], blocks.value.shape[-1])
    lanes = zip(*(rows.flatten(0, 1) for rows in (query, chosen, blocks.key, blocks.value)), strict=True)
    out = torch.stack([lane(*parts) for parts in lanes])
    return out.reshape(*query.shape[:-1], out.shape[-1])


def lane(query: Tensor, chosen: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Outputs [query, shared, value_size] of one group of one sequence; its keys are [block, within, size]."""
    near, height = own(query, key, value)
    top = chosen.shape[-1] - 1
    far = chosen[:, 1:].flatten()
    if not bool((far >= 0).any()):
        return near
    seen, heights = others(query, far, key, value)
    shape = query.shape[0], top, query.shape[1]
    seen, heights = seen.reshape(*shape, seen.shape[-1]), heights.reshape(shape)
    factors = torch.cat([height[:, None], heights], dim=1).softmax(1)[..., None]
    return near * factors[:, 0] + seen.mul_(factors[:, 1:]).sum(1)


def own(query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Causal attention of queries [query, shared, size] within their own blocks."""
    within, rest = key.shape[1], query.shape[0] % key.shape[1]
    whole = query.shape[0] // within
    parts = [within_blocks(query[: whole * within], key[:whole], value[:whole])] if whole else []
    if rest:
        last = (rows[whole : whole + 1, :rest] for rows in (key, value))
        parts.append(within_blocks(query[whole * within :], *last))
    outs, heights = zip(*parts, strict=True)
    return torch.cat(outs), torch.cat(heights)


def within_blocks(query: Tensor, key: Tensor, value: Tensor) -> Part:
    """Like `own`, for queries that fill their blocks."""
    shared = query.shape[1]
    tiles = torch.unflatten(query, 0, key.shape[:2]).transpose(1, 2)
    of_heads = (rows[:, None].expand(-1, shared, -1, -1) for rows in (key, value))
    out, heights = fused(tiles, *of_heads, causal=True)
    return out.transpose(1, 2).flatten(0, 1), heights.transpose(1, 2).flatten(0, 1)


def others(query: Tensor, far: Tensor, key: Tensor, value: Tensor) -> Part:
    """Attention of queries to earlier blocks, one result per selection [query x top]; -1 gets a log-sum of `LOWEST`."""
    tokens, shared, size = query.shape
    top = far.shape[0] // tokens
    order = far.argsort(stable=True)
    counts = (far + 1).bincount(minlength=len(key) + 1).tolist()
    rows = query.index_select(0, order[counts[0] :] // top)
    found, heights, start = [], [], 0
    for block, number in enumerate(counts[1:]):
        if number:
            some = rows[start : start + number].reshape(1, 1, number * shared, size)
            out, height = fused(some, key[block][None, None], value[block][None, None], causal=False)
            found.append(out.reshape(number, shared, -1))
            heights.append(height.reshape(number, shared))
            start += number
    # The index of each selection among the computed ones; selections of no block read the first, with weight zero.
    places = order.argsort() - counts[0]
    none = (places < 0)[:, None]
    places = places.clamp(min=0)
    return (
        torch.cat(found).index_select(0, places),
        torch.cat(heights).index_select(0, places).masked_fill(none, LOWEST),
    )


def fused(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Part:
    """Attention of pre-scaled queries [batch, heads, query, size] to as many heads of keys, by PyTorch's flash kernel.

    If flash attention is disabled, or keys and values differ in size, it is computed by matrix products instead.
    """
    enabled = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    if enabled and key.shape[-1] == value.shape[-1]:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 -- the only one with sums
        found: Part = attend(query, key, value, 0.0, causal, scale=1.0)
        return found
    scores = query @ key.transpose(-1, -2)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, LOWEST)
    heights = scores.logsumexp(-1)
    return (scores - heights[..., None]).exp() @ value, heights
