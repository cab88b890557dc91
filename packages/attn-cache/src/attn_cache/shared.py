"""A paged store that remembers the beginnings of sequences after their requests have ended."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.stores import ModelSpecs, StoreSize

from attn_cache.paged import PagedRows
from attn_cache.prefix import Block, Chain, PrefixIndex
from attn_cache.rows import first_visible
from attn_cache.store import Store


class SharedStore(Store):
    """Implements `attn_core.stores.PrefixStore`. Nothing is copied: requests hold the same pages, written once.

    Remembered pages are given up, the least recently used first, as running requests need room. States of fixed size
    exist only where a step ended, so of these a snapshot is taken at the last whole block of a prompt; as many as
    requests can run are kept. `rows`, by default plain pages, says how token rows are kept.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, rows: PagedRows | None = None) -> None:
        self._rows = PagedRows(specs, size) if rows is None else rows
        super().__init__(specs, size, self._rows)
        self._index = PrefixIndex(self._rows.page)
        self._most_snapshots = size.requests
        self._with_snapshot: list[Block] = []
        self._chains: dict[int, Chain] = {}

    def reserve(self, request: int, tokens: int) -> bool:
        """As `Store.reserve`; forgets remembered blocks where that makes room."""
        while not super().reserve(request, tokens):
            if not self._rows.would_fit(self._place(request), tokens):
                return False
            self._forget(self._index.oldest())
        return True

    def fork(self, request: int, copy: int, tokens: int) -> bool:
        """As `Store.fork`; forgets remembered blocks where that makes room."""
        while not super().fork(request, copy, tokens):
            if len(self._names) == self._requests or not self._rows.would_fork(tokens):
                return False
            self._forget(self._index.oldest())
        if request in self._chains:
            self._chains[copy] = self._chains[request]
        return True

    def release(self, request: int) -> None:
        """As `Store.release`; what was remembered of the request stays."""
        super().release(request)
        self._chains.pop(request, None)

    def adopt(self, request: int, tokens: Sequence[int], scope: str) -> int:
        """Give the request the longest beginning whose states of every kind are remembered."""
        place = self._place(request)
        found = self._index.find(tokens, scope)
        while found and not self._usable([block for _, block in found]):
            found.pop()
        if not found:
            return 0
        chain, last = found[-1]
        self._rows.adopt(place, chain.blocks * self._rows.page, [block.pages for _, block in found])
        if last.snapshot is not None:
            self._fixed.restore(place, last.snapshot)
        self._chains[request] = chain
        return chain.blocks * self._rows.page

    def remember(self, request: int, tokens: Sequence[int], computed: int, scope: str) -> None:
        """Remember the whole blocks of the first `computed` tokens that were completed since the last call."""
        chain = self._chains.get(request)
        if chain is not None and 0 < computed - chain.blocks * self._rows.page < self._rows.page:
            return
        place = self._place(request)
        chain = chain or self._index.root(scope)
        for chain, block in self._index.follow(chain, tokens, computed):  # noqa: B020 - each link begins where the last ended
            if self._index.get(chain) is None:
                self._index.add(chain, Block(block, self._rows.keep(place, chain.blocks - 1)))
        self._chains[request] = chain
        last = self._index.get(chain)
        if self._has_fixed and last and last.snapshot is None and chain.blocks * self._rows.page == computed:
            self._snapshot(last, place)

    def chunk(self, computed: int, length: int, prompt: int) -> int:
        """The next `length` tokens, or those to the prompt's last whole block where fixed states are to be kept."""
        boundary = (prompt - 1) // self._rows.page * self._rows.page
        if self._has_fixed and computed < boundary < computed + length:
            return boundary - computed
        return length

    def _usable(self, blocks: Sequence[Block]) -> bool:
        """Whether the next token after these blocks finds every state it reads."""
        if self._has_fixed and blocks[-1].snapshot is None:
            return False
        for window in self._rows.groups:
            first = first_visible(len(blocks) * self._rows.page, window) // self._rows.page
            if any(window not in block.pages for block in blocks[first:]):
                return False
        return True

    def _snapshot(self, block: Block, place: int) -> None:
        if len(self._with_snapshot) == self._most_snapshots:
            self._with_snapshot.pop(0).snapshot = None
        block.snapshot = self._fixed.snapshot(place)
        self._with_snapshot.append(block)

    def _forget(self, block: Block) -> None:
        self._rows.let_go(block.pages)
        if block.snapshot is not None:
            self._with_snapshot.remove(block)
