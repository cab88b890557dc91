"""Queries that chose a block are brought to it in tiles, so that a block's keys are read once a tile."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.kernels.selected import KeyBlocks
from attn_core.masking import LOWEST
from torch import Tensor

TILE = 64
"""Queries that meet a block together, where there are so many."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Who meets whom. A lane is a group of a sequence; queries are numbered through all lanes, and so are blocks.

    `blocks` [tile] are the blocks met, `queries` [tile, within] who meets them, any where a tile is not full. `slots`
    [lane, query, top] are the places of each choice among tiles x within, `real` where there is one.
    """

    blocks: Tensor
    queries: Tensor
    slots: Tensor
    real: Tensor


def attend_in_tiles(query: Tensor, chosen: Tensor, places: Tensor, blocks: KeyBlocks, tile: int = TILE) -> Tensor:
    """Outputs [batch, groups, query, shared, value_size], as of `SelectedBlocksKernel.read`.

    Tiles have `tile` queries; no more than there are will do.
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
    """How many tiles a lane is given: each but the last of a block is full, and none is empty."""
    return min(queries * top, queries * top // tile + blocks)


def tiled(chosen: Tensor, blocks: int, tile: int) -> Tiles:
    """Tiles of `tile` queries for the choices [lane, query, top] among `blocks` blocks a lane."""
    lanes, queries, top = chosen.shape
    real = chosen >= 0
    at = chosen.clamp(min=0)
    # SelectedBlocks that are none go behind the last block, where nobody looks.
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
    """Bool [tile, within, key], True where the query of a tile's place may see a key of its block."""
    within, count = blocks.key_padding_mask.shape[-1], blocks.key.shape[2]
    owner = places[:, None].expand(-1, groups, -1).flatten().index_select(0, tiles.queries.flatten())
    kept = blocks.key_padding_mask[:, None].expand(-1, groups, -1, -1).flatten(0, 2).index_select(0, tiles.blocks)
    key = (tiles.blocks % count)[:, None] * within + (places.new_ones(within).cumsum(0) - 1)
    allowed: Tensor = (key[:, None] <= owner.reshape_as(tiles.queries)[..., None]) & kept[:, None]
    return allowed


def joined(parts: tuple[Tensor, Tensor, Tensor], tiles: Tiles) -> Tensor:
    """Outputs [lane, query, shared, value_size] of sums [slot, shared, value_size] of values times exponentials.

    With them come sums of exponentials and the largest score [slot, shared] that was taken off each.
    """
    at = tiles.slots.flatten()
    found, sums, most = (part.index_select(0, at).reshape(*tiles.slots.shape, *part.shape[1:]) for part in parts)
    none = ~tiles.real[..., None]
    # Where there is no choice another sequence's numbers stand, which may be no numbers: times zero they would stay so.
    found, sums = found.masked_fill(none[..., None], 0.0), sums.masked_fill(none, 0.0)
    most = most.masked_fill(none, LOWEST)
    real = most > LOWEST
    share = (most - most.amax(2, keepdim=True)).exp() * real
    whole = (sums * share).sum(2)
    out: Tensor = (found * share[..., None]).sum(2)
    return out / (whole + (whole == 0))[..., None]
