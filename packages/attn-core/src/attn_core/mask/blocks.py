"""Which blocks of pairs a mask leaves empty, fills, or cuts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from attn_core.errors import InvalidValue
from attn_core.mask.checks import at_least
from attn_core.mask.mask import Mask
from attn_core.mask.runs import Runs


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Blocks of `block` queries by `block` keys; the last of either may be shorter.

    `full[r]` are the key blocks of which every query of block r sees every key, `partial[r]` those of which some pair
    is allowed and some is not, both ascending; all others are empty.
    """

    block: int
    full: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, ...], ...]

    @property
    def computed(self) -> int:
        """Number of blocks that are not empty."""
        return sum(map(len, self.full)) + sum(map(len, self.partial))


def blocks(mask: Mask, queries: int, keys: int, block: int) -> BlockLayout:
    """The layout of a mask over `queries` queries aligned to the end of `keys` keys; exact.

    Found from the runs of each query, never from all pairs. Raises `InvalidValue` for a mask that differs by head: each
    head's mask has a layout of its own.
    """
    at_least("block", block, 1)
    if mask.heads is not None:
        raise InvalidValue.of("mask", mask, "a mask that is the same for all heads: ask mask.of_head(head)")
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
