"""The stores that keep rows as they are, by name. Imports no torch before one is created."""

from __future__ import annotations

from attn_core import CacheFamily, Slot
from attn_core.stores import ModelSpecs, StateStore, StoreSize


class Contiguous(CacheFamily):
    """Room for the longest sequence set aside for every request; a batch is read without copying."""

    name = "contiguous"
    summary = "Rows of a request lie side by side; read without copying, room for the longest set aside for each."

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """A store in which each request may hold `size.tokens // size.requests` tokens."""
        from attn_cache.contiguous import ContiguousRows
        from attn_cache.store import Store

        return Store(specs, size, ContiguousRows(specs, size))


class PagedTokens(CacheFamily):
    """Pages of 16 tokens, taken as a request grows (Kwon et al. 2023, arXiv 2309.06180)."""

    name = "paged"
    summary = "Pages of 16 tokens taken as a request grows; no room set aside, a batch is gathered to be read."

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """A store in which any request may take any of the `size.tokens` tokens, rounded up to whole pages."""
        from attn_cache.paged import PagedRows
        from attn_cache.store import Store

        return Store(specs, size, PagedRows(specs, size))


class SharedTokens(CacheFamily):
    """As `paged`, and requests that begin alike hold the same pages; beginnings outlive their requests."""

    name = "shared"
    summary = "Pages of 16 tokens; requests that begin alike share them, also with requests that have ended."

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """As `PagedTokens.create`; what requests leave free of the `size.tokens` remembers beginnings."""
        from attn_cache.shared import SharedStore

        return SharedStore(specs, size)

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """See `CacheFamily.room`; beginnings that are shared bring as many snapshots of the fixed states."""
        return super().room(specs, size) + snapshot_bytes(specs, size)


def snapshot_bytes(specs: ModelSpecs, size: StoreSize) -> int:
    """Bytes of the snapshots of fixed states that a store keeps of beginnings."""
    states = [spec for layer in specs.values() for spec in layer.values() if isinstance(spec, Slot)]
    return size.requests * sum(spec.row_bytes(size.dtype) for spec in states)
