"""The inputs of steps with prompts over a store, in memory of fixed addresses, for CUDA graphs.

Like `attn_cache.static_decode`, for steps with tokens of any requests, in chunks of any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from attn_core.batch import ModelState, StaticMixedBatch, StaticMixedRows
from torch import Tensor

from attn_cache.memory import StateKey
from attn_cache.paged import PagedKVCache
from attn_cache.static_inputs import RowTable, StaticPagedView, StepBuffer, blocks_of, scrap_table

STARTS, CONTEXTS, TOKENS, POSITIONS, SLOTS = range(5)
"""Lines of the buffer: the first two have entries per request, the others per token; from `SLOTS` on one per window."""


class StaticMixedSize(NamedTuple):
    """The limits of a step: its number of tokens, of requests, and the tokens of each request (`longest`)."""

    tokens: int
    requests: int
    longest: int


class BlocksOfTokens:
    """Implements `attn_core.stores.StaticMixed` over a `PagedKVCache`; `index` returns a request's index in it."""

    def __init__(self, cache: PagedKVCache, index: Callable[[int], int], size: StaticMixedSize) -> None:
        self._cache = cache
        self._index = index
        self._size = size
        windows = len(cache.pools)
        lines = [size.requests + 2, size.requests + 1, *[size.tokens] * (2 + windows)]
        tables = windows, size.requests, blocks_of(size.longest, cache.block_size)
        self._buffer = StepBuffer(lines, tables, cache.device)
        (self._scrap,) = scrap_table(cache).blocks
        self._rows = {window: [RowTable() for _ in range(size.requests)] for window in cache.pools}

    def load(
        self, tokens: Sequence[int], contexts: Sequence[int], lengths: Sequence[int], names: Sequence[int], size: int
    ) -> None:
        """See `StaticMixed.load`."""
        indices, num_requests, num_tokens = [self._index(name) for name in names], len(names), len(tokens)
        for index, context, length in zip(indices, contexts, lengths, strict=True):
            self._cache.begin(index, context, context + length)
        lines, block = self._buffer.lines, self._cache.block_size
        counts = np.asarray(lengths, dtype=np.int64)
        request_of, starts = np.repeat(np.arange(num_requests), counts), np.concatenate([[0], np.cumsum(counts)])
        # Entries after the last request have no tokens, except the last one, which has those of padding.
        lines[STARTS][:] = num_tokens
        lines[STARTS][: num_requests + 1] = starts
        lines[STARTS][self._requests(size) + 1] = size
        lines[CONTEXTS][:] = -1
        lines[CONTEXTS][:num_requests] = contexts
        lines[TOKENS][:size] = 0
        lines[TOKENS][:num_tokens] = tokens
        positions = np.asarray(contexts, dtype=np.int64)[request_of] + np.arange(num_tokens) - starts[request_of]
        lines[POSITIONS][:size] = 0
        lines[POSITIONS][:num_tokens] = positions
        changed = False
        for number, (window, pool) in enumerate(self._cache.pools.items()):
            table = self._buffer.tables[number]
            for row, index in enumerate(indices):
                changed |= self._rows[window][row].follow(pool.tables[index], table[row])
            slots = lines[SLOTS + number]
            slots[num_tokens:size] = self._scrap * block
            slots[:num_tokens] = table[request_of, positions // block].astype(np.int64) * block + positions % block
        self._buffer.send(whole=changed)

    def tokens(self, size: int) -> Tensor:
        """See `StaticMixed.tokens`."""
        return self._buffer.line(TOKENS)[:size]

    def batch(self, size: int) -> StaticMixedBatch:
        """See `StaticMixed.batch`."""
        return StaticMixedBatch(self._buffer.line(POSITIONS)[:size], self._size.longest)

    def view(self, size: int) -> ModelState:
        """See `StaticMixed.view`."""
        views: dict[str, dict[str, object]] = {}
        for layer, state in self._cache.windows:
            views.setdefault(layer, {})[state] = self._view((layer, state), size)
        return views

    def _view(self, key: StateKey, size: int) -> StaticPagedView:
        number, requests = list(self._cache.pools).index(self._cache.windows[key]), self._requests(size)
        rows = StaticMixedRows(
            self._cache.memory[key],
            self._buffer.line(SLOTS + number)[:size],
            self._buffer.table(number)[:requests],
            (),
            block_size=self._cache.block_size,
            contexts=self._buffer.line(CONTEXTS)[: requests + 1],
            query_starts=self._buffer.line(STARTS)[: requests + 2],
        )
        return StaticPagedView(".".join(key), rows)

    def _requests(self, size: int) -> int:
        """The largest number of requests in a step of `size` tokens."""
        return min(size, self._size.requests)
