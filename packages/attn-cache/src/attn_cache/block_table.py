"""Which blocks of the pool each request holds (block tables, reference counts), for all states of one sliding window.

Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv 2309.06180.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

BLOCK_SIZE = 16
"""Default number of tokens in a block."""


@dataclass
class BlockTable:
    """The blocks of one request: `blocks[i]` stores positions `(first + i) * block_size` and following.

    `first` is above 0 where blocks that lie wholly before the sliding window were freed. `edits` counts the changes
    that did more than append blocks.
    """

    block_size: int
    first: int = 0
    blocks: list[int] = field(default_factory=list)
    edits: int = 0

    @property
    def end(self) -> int:
        """The first position beyond the allocated blocks."""
        return (self.first + len(self.blocks)) * self.block_size

    def slot(self, position: int) -> int:
        """The row of the pool that stores a position."""
        return self.blocks[position // self.block_size - self.first] * self.block_size + position % self.block_size


class BlockPool:
    """The blocks of all states of one sliding window. Block 0 is never allocated and stays zero: padding reads it.

    Several requests may share a full block, which none of them writes any more (reference counts). A *pinned* block is
    kept for prefix caching when no request references it any more; it is then *cached*.
    """

    def __init__(self, window: int | None, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.window = window
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables: list[BlockTable] = []
        # A heap, lowest block first: requests that run alone get adjacent blocks, which are read without a gather.
        self._free = list(range(1, num_blocks + 1))
        self._ref_counts = [0] * (num_blocks + 1)
        self._pinned: set[int] = set()
        self._cached = 0

    @property
    def used_blocks(self) -> int:
        """Blocks that requests reference."""
        return self.num_blocks - len(self._free) - self._cached

    @property
    def cached_blocks(self) -> int:
        """Pinned blocks that no request references."""
        return self._cached

    def add_request(self) -> None:
        """Add a request without blocks."""
        self.tables.append(BlockTable(self.block_size))

    def missing(self, index: int, tokens: int) -> int:
        """Blocks to allocate before the request at `index` has room for positions below `tokens`."""
        return max(0, -(-(tokens - self.tables[index].end) // self.block_size))

    def can_allocate(self, blocks: int) -> bool:
        """Whether this many blocks are free."""
        return blocks <= len(self._free)

    def allocate(self, index: int, blocks: int) -> None:
        """Append this many free blocks to the request's table."""
        allocated = [heapq.heappop(self._free) for _ in range(blocks)]
        for block in allocated:
            self._ref_counts[block] = 1
        self.tables[index].blocks += allocated

    def share(self, index: int, first: int, blocks: list[int]) -> None:
        """Let an empty request reference these pinned blocks as block number `first` of its sequence and following."""
        for block in blocks:
            self._cached -= self._ref_counts[block] == 0
            self._ref_counts[block] += 1
        self.tables[index] = BlockTable(self.block_size, first, list(blocks))

    def fork(self, index: int, tokens: int) -> tuple[int, int] | None:
        """Add a request that shares the full blocks of another's first `tokens` positions (copy on write).

        A partly filled last block is allocated anew: returns (block, its copy) for the caller to copy, None if there
        is no such block.
        """
        table = self.tables[index]
        full, partial = tokens // self.block_size - table.first, tokens % self.block_size > 0
        shared = table.blocks[:full]
        for block in shared:
            self._ref_counts[block] += 1
        self.tables.append(BlockTable(self.block_size, table.first, list(shared)))
        if not partial:
            return None
        self.allocate(len(self.tables) - 1, 1)
        return table.blocks[full], self.tables[-1].blocks[-1]

    def pin(self, block: int) -> None:
        """Keep a block that a request references, even when no request does any more."""
        self._pinned.add(block)

    def unpin(self, block: int) -> None:
        """End `pin`; the block becomes free if no request references it."""
        self._pinned.remove(block)
        if self._ref_counts[block] == 0:
            self._cached -= 1
            heapq.heappush(self._free, block)

    def free_before(self, index: int, position: int) -> None:
        """Free the request's blocks that end before `position`."""
        table, behind = self.tables[index], self._count_before(index, position)
        self._release(table.blocks[:behind])
        del table.blocks[:behind]
        table.first += behind
        table.edits += behind > 0

    def truncate(self, index: int, position: int) -> None:
        """Free the request's blocks from the one that stores `position` on."""
        table, number = self.tables[index], position // self.block_size
        kept = max(0, number - table.first)
        self._release(table.blocks[kept:])
        del table.blocks[kept:]
        table.first = min(table.first, number)
        table.edits += 1

    def would_free(self, index: int, position: int) -> int:
        """The number of blocks that `free_before` would make available to other requests."""
        return sum(block not in self._pinned for block in self.exclusive_before(index, position))

    def exclusive_before(self, index: int, position: int) -> list[int]:
        """Blocks that end before `position` and that no other request references; some may be pinned."""
        behind = self.tables[index].blocks[: self._count_before(index, position)]
        return [block for block in behind if self._ref_counts[block] == 1]

    def remove_request(self, index: int) -> None:
        """Free all blocks of the request; the last request takes over its index."""
        self._release(self.tables[index].blocks)
        last = self.tables.pop()
        if index < len(self.tables):
            self.tables[index] = last

    def _count_before(self, index: int, position: int) -> int:
        table = self.tables[index]
        return max(0, min(position // self.block_size - table.first, len(table.blocks)))

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._pinned:
                    self._cached += 1
                else:
                    heapq.heappush(self._free, block)
