"""The interface of a KV cache, which stores the rows of every `Paged` state, and helpers its implementations share.

A request is known here by its *index*: requests are numbered 0, 1, 2, ... without gaps, and when one is removed the
last request takes over its index. A *slot* is the offset of a row within the sequence of its request: the token's
position, except for the tokens of a draft tree (see `RaggedBatch.paths`). In a state with a row per several tokens it
is the number of the row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from attn_core import Field, Paged, RaggedBatch
from attn_core.batch import PagedView
from attn_core.stores import ModelSpecs
from torch import Tensor

from attn_cache.memory import FieldKey, StateKey, states_of

Window = int | None
"""Sliding window of a state in tokens, the newest included; None for full attention."""


class Extent(NamedTuple):
    """Which rows a state keeps: those within a sliding window, one per `every` tokens. States of one extent have their
    rows at the same places."""

    window: Window = None
    every: int = 1

    def first(self, position: int) -> int:
        """The number of the first row that a query at `position` attends to."""
        return first_visible(position, self.window)

    def rows(self, tokens: int) -> int:
        """The number of rows that `tokens` tokens complete, including those before the window."""
        return tokens // self.every


MANY_TOKENS = "a row of several tokens exists once per request, so it cannot represent several branches"
Cache = TypeVar("Cache")
Selection = TypeVar("Selection")


class KVCacheStep(Protocol):
    """The rows of one engine step; index tensors that its views share are computed once."""

    def view(self, layer: str, state: str) -> PagedView:
        """The view of one state of one layer."""
        ...


class KVCache(Protocol):
    """Per-token rows (keys, values, latents, ...) of all layers and all running requests."""

    @property
    def used_tokens(self) -> int:
        """The capacity that requests hold, in tokens."""
        ...

    @property
    def total_tokens(self) -> int:
        """The total capacity, in tokens."""
        ...

    def fits(self, tokens: int) -> bool:
        """Whether one request of this many tokens fits into the empty cache."""
        ...

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether this many requests of this many tokens each fit into the empty cache."""
        ...

    def add_request(self) -> None:
        """Add an empty request at the next index."""
        ...

    def remove_request(self, index: int) -> None:
        """Free the request at `index`; the last request takes over its index."""
        ...

    def reserve(self, index: int, tokens: int) -> bool:
        """Reserve capacity for positions below `tokens`; False, changing nothing, if there is not enough."""
        ...

    def fork(self, index: int, tokens: int) -> bool:
        """Add a request at the next index with the first `tokens` rows of another; False without capacity."""
        ...

    def rewind(self, index: int, tokens: int) -> None:
        """Drop the rows from position `tokens` on."""
        ...

    def tree_unsupported_reason(self) -> str | None:
        """Why draft tokens cannot form a tree in this cache; None if they can."""
        ...

    def move(self, index: int, slots: Sequence[int], start: int) -> None:
        """Copy the rows at these slots to consecutive slots from `start` on."""
        ...

    def step(self, indices: Sequence[int], batch: RaggedBatch) -> KVCacheStep:
        """The step of a batch whose request r has the index `indices[r]`."""
        ...

    def export_rows(self, index: int, tokens: int) -> dict[FieldKey, Tensor]:
        """The rows [rows, ...] that the token after the first `tokens` attends to; `WrongState` without them."""
        ...

    def start_at(self, index: int, tokens: int) -> None:
        """Let the empty request at `index` continue after `tokens` tokens, whose rows are not reserved yet."""
        ...

    def import_rows(self, index: int, tokens: int, rows: Mapping[FieldKey, Tensor]) -> None:
        """Write rows that `export_rows` returned into the reserved rows of a request."""
        ...

    def live_bytes(self, index: int, tokens: int) -> int:
        """Bytes of the rows that the next token of a request of `tokens` tokens can attend to."""
        ...


def first_visible(position: int, window: Window) -> int:
    """The first position that a query at `position` attends to; a window includes the query itself."""
    return 0 if window is None else max(0, position - window + 1)


def extents_of(specs: ModelSpecs) -> dict[StateKey, Extent]:
    """The extent of every `Paged` state."""
    return {(layer, state): Extent(spec.window, spec.every) for layer, state, spec in states_of(specs, Paged)}


def fields_of(specs: ModelSpecs, extent: Extent) -> dict[FieldKey, Field]:
    """The fields of all `Paged` states of this extent."""
    return {
        (layer, state, name): field
        for layer, state, spec in states_of(specs, Paged)
        if Extent(spec.window, spec.every) == extent
        for name, field in spec.fields.items()
    }


def slots_at(batch: RaggedBatch, requests: Sequence[int], positions: Tensor, firsts: Sequence[int]) -> Tensor:
    """The slots of the rows at `positions` [requests, longest]; they differ from the positions only in a draft tree.

    `firsts[i]` is the position in the first column of row i.
    """
    paths = [batch.path(request) for request in requests]
    if not any(paths):
        return positions
    slots = positions.clone()
    for row, (request, path) in enumerate(zip(requests, paths, strict=True)):
        if path:
            column = batch.contexts[request] + 1 - len(path) - firsts[row]
            visible = path[max(0, -column) :]
            column = max(0, column)
            slots[row, column : column + len(visible)] = torch.tensor(visible, device=slots.device)
            # Padding must not point at other tokens of the tree: they are not ancestors of this one.
            slots[row, column + len(visible) :] = slots[row, 0]
    return slots


class CachedStep(Generic[Cache, Selection]):
    """The requests of one step and their indices in the cache; caches which rows a set of requests attends to."""

    def __init__(self, cache: Cache, indices: Sequence[int], batch: RaggedBatch) -> None:
        self.cache = cache
        self.indices = tuple(indices)
        self.batch = batch
        self.tokens = sum(batch.lengths)
        self._selections: dict[tuple[Extent, tuple[int, ...]], Selection] = {}

    def select(self, extent: Extent, requests: Sequence[int]) -> Selection:
        """The rows that these requests of the batch attend to; computed once for all layers of one extent."""
        key = (extent, tuple(requests))
        if key not in self._selections:
            self._selections[key] = self._select(*key)
        return self._selections[key]

    @abstractmethod
    def _select(self, extent: Extent, requests: tuple[int, ...]) -> Selection: ...

    def new_rows(self, extent: Extent) -> list[Sequence[int]]:
        """The slots to which each request writes in this step."""
        if extent.every > 1:
            return [*self.batch.new_rows(extent.every)]
        return [self.batch.places(request) for request in range(self.batch.requests)]

    def bounds(self, extent: Extent, requests: Sequence[int]) -> tuple[list[int], list[int]]:
        """The numbers of the first row that each of the requests attends to, and of the row after the last."""
        contexts, lengths = self.batch.contexts, self.batch.lengths
        return [extent.first(contexts[r]) for r in requests], [extent.rows(contexts[r] + lengths[r]) for r in requests]
