"""What kernels derive from a mask: the blocks to compute, the density, and FlexAttention's `mask_mod`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from attn_core.checks import require_whole
from attn_core.errors import InvalidValue
from attn_core.masks.base import Mask
from attn_core.masks.ranges import Runs, merged, size


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Blocks of `block` queries by `block` keys; the last block of either may be shorter.

    `full[r]` are the key blocks of which every query of block r sees every key, `partial[r]` those of which some pairs
    are allowed and some are not, both ascending; all others are empty.
    """

    block: int
    full: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, ...], ...]

    @property
    def computed(self) -> int:
        """Number of blocks that are not empty."""
        return sum(map(len, self.full)) + sum(map(len, self.partial))


def blocks(mask: Mask, queries: int, keys: int, block: int) -> BlockLayout:
    """The exact layout of a mask over `queries` queries aligned to the end of `keys` keys.

    Computed from the runs of each query, not from all pairs. Raises `InvalidValue` for a mask that differs by head:
    each head's mask has its own layout.
    """
    require_whole("block", block, ge=1)
    if mask.heads is not None:
        raise InvalidValue.of("mask", mask, "a mask that is the same for all heads, such as mask.of_head(head)")
    bound = mask.over(keys)
    full, partial = [], []
    for start in range(0, queries, block):
        rows = range(start, min(start + block, queries))
        pairs: Counter[int] = Counter()
        for row in rows:
            add_pairs(pairs, bound.runs(keys - queries + row, keys), block)
        whole = {key for key, count in pairs.items() if count == len(rows) * min(block, keys - key * block)}
        full.append(tuple(sorted(whole)))
        partial.append(tuple(sorted(pairs.keys() - whole)))
    return BlockLayout(block=block, full=tuple(full), partial=tuple(partial))


def add_pairs(pairs: Counter[int], runs: Runs, block: int) -> None:
    """Add to each key block the number of its keys that are in the runs."""
    for start, stop in runs:
        for key in range(start // block, (stop - 1) // block + 1):
            pairs[key] += min(stop, (key + 1) * block) - max(start, key * block)


SAMPLES = 8
"""Largest number of tiles that are sampled, evenly spread."""


@lru_cache(maxsize=256)
def density(mask: Mask, queries: int, keys: int, tile: int) -> float:
    """The share of pairs, from 0 to 1, that a kernel computes which skips keys that no query of a tile sees.

    Estimated from a few tiles of `tile` queries, as `tiled` forms them, and at most four heads. Both lengths are at
    least 1. It is 1 for a mask whose runs have no closed form: finding them would take longer than the attention.
    """
    if not mask.closed:
        return 1.0
    bound = mask.over(keys)
    count = bound.heads or 1
    heads = [bound.of_head(head) for head in range(0, count, -(-count // 4))]
    shares = [seen_by_tiles(head, queries, keys, tile) for head in heads]
    return sum(shares) / len(shares)


def seen_by_tiles(mask: Mask, queries: int, keys: int, tile: int) -> float:
    """The mean share of the keys that tiles see, summed over the masks that this one is split into."""
    return sum(share_of_part(part, queries, keys, tile) for part in mask.split)


def share_of_part(mask: Mask, queries: int, keys: int, tile: int) -> float:
    """The mean share of the keys that a tile sees, over at most `SAMPLES` tiles."""
    tiles = tiled(mask, queries, tile)
    places = range(SAMPLES) if len(tiles) > SAMPLES else range(len(tiles))
    chosen = [tiles[(2 * place + 1) * len(tiles) // (2 * len(places))] for place in places]
    return sum(size(seen_by(mask, rows, queries, keys)) for rows in chosen) / (len(chosen) * keys)


def tiled(mask: Mask, queries: int, tile: int) -> list[range]:
    """Divide the queries into tiles of at most `tile` queries, `mask.period` apart, that see nearly the same keys."""
    step = mask.period
    return [
        range(start, min(start + tile * step, queries), step)
        for residue in range(min(step, queries))
        for start in range(residue, queries, tile * step)
    ]


def seen_by(mask: Mask, rows: range, queries: int, keys: int) -> Runs:
    """The keys that any of the queries `rows` sees; queries are numbered from 0 and aligned to the end of the keys."""
    offset = keys - queries
    return merged(sorted({piece for row in rows for piece in mask.runs(row + offset, keys)}))


MaskMod = Callable[[Any, Any, Any, Any], Any]
"""A function of integer tensors (batch, head, query, key) that broadcast: whether the query may see the key."""


def mask_mod(mask: Mask, queries: int, keys: int) -> MaskMod:
    """The `mask_mod` function of a mask for `torch.nn.attention.flex_attention.create_block_mask`.

    FlexAttention counts queries from 0; query 0 of `queries` has the position `keys - queries`.
    """
    bound, offset = mask.over(keys), keys - queries

    def same_for_all(batch: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 -- FlexAttention's form
        return bound.allows(query + offset, key)

    def differs_by_head(batch: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 -- FlexAttention's form
        seen = head < 0
        for one in range(bound.heads or 0):
            seen = seen | ((head == one) & bound.of_head(one).allows(query + offset, key))
        return seen

    return same_for_all if bound.heads is None else differs_by_head
