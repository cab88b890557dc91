"""Automatic prefix caching: requests that begin with the same tokens share the same blocks, which outlive them.

Blocks are found by a chain of hashes, each over the tokens of a block and the hash of all blocks before it (Kwon et al.
2023, arXiv 2309.06180, section 4.4). The hash key is secret to the process, and the tokens of a block are compared when
it is found, so a hash collision cannot show one request the state of another.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from attn_core.stores import ModelSpecs, StoreSize

from attn_cache.kv_cache import Window, first_visible
from attn_cache.paged import PagedKVCache
from attn_cache.slots import Snapshot
from attn_cache.store import Store


@dataclass
class CachedBlock:
    """A full block of cached tokens: its block number by window, and possibly a snapshot of the fixed-size states."""

    tokens: tuple[int, ...]
    blocks: Mapping[Window, int]
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class PrefixHash:
    """The hash of the first `num_blocks` blocks of a sequence."""

    num_blocks: int
    digest: bytes


class PrefixIndex:
    """Cached blocks by the hash of their prefix, in least recently used order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._secret = os.urandom(blake2b.MAX_KEY_SIZE)
        self._blocks: OrderedDict[bytes, CachedBlock] = OrderedDict()

    def root(self, scope: str) -> PrefixHash:
        """The hash of the empty prefix; prefixes of different scopes never match."""
        return PrefixHash(0, blake2b(scope.encode(), key=self._secret).digest())

    def follow(
        self, prefix: PrefixHash, tokens: Sequence[int], end: int
    ) -> Iterator[tuple[PrefixHash, tuple[int, ...]]]:
        """The hash after each further full block of the first `end` tokens, and the tokens of that block."""
        for start in range(prefix.num_blocks * self._block_size, end - self._block_size + 1, self._block_size):
            block = tuple(tokens[start : start + self._block_size])
            digest = blake2b(prefix.digest + array("q", block).tobytes(), key=self._secret).digest()
            prefix = PrefixHash(prefix.num_blocks + 1, digest)
            yield prefix, block

    def find(self, tokens: Sequence[int], scope: str) -> list[tuple[PrefixHash, CachedBlock]]:
        """The cached blocks of the longest cached prefix; they become the most recently used."""
        found = []
        for prefix, block in self.follow(self.root(scope), tokens, len(tokens)):
            known = self._blocks.get(prefix.digest)
            if known is None or known.tokens != block:
                break
            found.append((prefix, known))
        # The first block last: a block is useless without those before it, so they are evicted after it.
        for prefix, _ in reversed(found):
            self._blocks.move_to_end(prefix.digest)
        return found

    def get(self, prefix: PrefixHash) -> CachedBlock | None:
        """The last block of the prefix, if it is cached."""
        return self._blocks.get(prefix.digest)

    def add(self, prefix: PrefixHash, block: CachedBlock) -> None:
        """Add the last block of a prefix that is not cached."""
        self._blocks[prefix.digest] = block

    def evict(self) -> CachedBlock:
        """Remove and return the least recently used block."""
        return self._blocks.popitem(last=False)[1]


class SharedStore(Store):
    """Implements `attn_core.stores.PrefixStore`. Nothing is copied: requests reference the same blocks, written once.

    Cached blocks are evicted, the least recently used first, when running requests need blocks. States of fixed size
    exist only at the end of a step, so a snapshot of them is taken at the last full block of a prompt; at most
    `size.requests` snapshots are kept. `kv_cache` defaults to a new `PagedKVCache`.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, kv_cache: PagedKVCache | None = None) -> None:
        self._paged = PagedKVCache(specs, size) if kv_cache is None else kv_cache
        super().__init__(specs, size, self._paged)
        self._prefixes = PrefixIndex(self._paged.block_size)
        self._max_snapshots = size.requests
        self._with_snapshot: list[CachedBlock] = []
        self._cached_prefix_of: dict[int, PrefixHash] = {}

    def reserve(self, request: int, tokens: int) -> bool:
        """Like `Store.reserve`; evicts cached blocks where that makes room."""
        while not super().reserve(request, tokens):
            if not self._paged.would_fit(self._index(request), tokens):
                return False
            self._unpin(self._prefixes.evict())
        return True

    def fork(self, request: int, copy: int, tokens: int) -> bool:
        """Like `Store.fork`; evicts cached blocks where that makes room."""
        while not super().fork(request, copy, tokens):
            if self.full or not self._paged.would_fork(tokens):
                return False
            self._unpin(self._prefixes.evict())
        if request in self._cached_prefix_of:
            self._cached_prefix_of[copy] = self._cached_prefix_of[request]
        return True

    def release(self, request: int) -> None:
        """Like `Store.release`; cached blocks of the request stay cached."""
        super().release(request)
        self._cached_prefix_of.pop(request, None)

    def adopt(self, request: int, tokens: Sequence[int], scope: str) -> int:
        """Give the request the longest cached prefix of `tokens` for which every kind of state is available.

        Returns the length of that prefix in tokens, a multiple of the block size.
        """
        index = self._index(request)
        found = self._prefixes.find(tokens, scope)
        while found and not self._usable([block for _, block in found]):
            found.pop()
        if not found:
            return 0
        prefix, last = found[-1]
        self._paged.share(index, prefix.num_blocks * self._paged.block_size, [block.blocks for _, block in found])
        if last.snapshot is not None:
            self._slots.restore(index, last.snapshot)
        self._cached_prefix_of[request] = prefix
        return prefix.num_blocks * self._paged.block_size

    def remember(self, request: int, tokens: Sequence[int], computed: int, scope: str) -> None:
        """Cache the full blocks of the first `computed` tokens that were completed since the last call."""
        size = self._paged.block_size
        prefix = self._cached_prefix_of.get(request)
        if prefix is not None and 0 < computed - prefix.num_blocks * size < size:
            return
        index = self._index(request)
        prefix = prefix or self._prefixes.root(scope)
        for prefix, block in self._prefixes.follow(prefix, tokens, computed):  # noqa: B020 - each hash continues the last
            if self._prefixes.get(prefix) is None:
                self._prefixes.add(prefix, CachedBlock(block, self._paged.pin(index, prefix.num_blocks - 1)))
        self._cached_prefix_of[request] = prefix
        last = self._prefixes.get(prefix)
        if self._slots.names and last and last.snapshot is None and prefix.num_blocks * size == computed:
            self._take_snapshot(last, index)

    def chunk(self, computed: int, length: int, prompt: int) -> int:
        """`length`, or the number of tokens up to the end of the prompt's last full block, where a snapshot is due."""
        boundary = (prompt - 1) // self._paged.block_size * self._paged.block_size
        if self._slots.names and computed < boundary < computed + length:
            return boundary - computed
        return length

    def _usable(self, blocks: Sequence[CachedBlock]) -> bool:
        """Whether every state that the token after these blocks reads is available."""
        if self._slots.names and blocks[-1].snapshot is None:
            return False
        for window in self._paged.pools:
            first = first_visible(len(blocks) * self._paged.block_size, window) // self._paged.block_size
            if any(window not in block.blocks for block in blocks[first:]):
                return False
        return True

    def _take_snapshot(self, block: CachedBlock, index: int) -> None:
        if len(self._with_snapshot) == self._max_snapshots:
            self._with_snapshot.pop(0).snapshot = None
        block.snapshot = self._slots.snapshot(index)
        self._with_snapshot.append(block)

    def _unpin(self, block: CachedBlock) -> None:
        self._paged.unpin(block.blocks)
        if block.snapshot is not None:
            self._with_snapshot.remove(block)
