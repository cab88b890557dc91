"""The cache families of this package, by name. Imports no torch before a store is created."""

from __future__ import annotations

from typing import ClassVar

from attn_core import CacheFamily, Paged, Slot, hookimpl
from attn_core.stores import ModelSpecs, StateStore, StoreSize

from attn_cache.quantization import Affine, Half, KiviLayout, Quantizer, Symmetric, quantized_specs


class ContiguousCache(CacheFamily):
    """Memory for the longest sequence is reserved for every request; a batch is read without copying."""

    name = "contiguous"
    summary = "One contiguous region of memory per request, sized for the longest sequence; read without copying."
    portable = True

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """A store in which each request can hold `size.tokens // size.requests` tokens."""
        from attn_cache.contiguous import ContiguousKVCache
        from attn_cache.store import Store

        return Store(specs, size, ContiguousKVCache(specs, size))


class PagedCache(CacheFamily):
    """Blocks of 16 tokens, allocated as a request grows (Kwon et al. 2023, arXiv 2309.06180)."""

    name = "paged"
    summary = "Blocks of 16 tokens, allocated as a request grows; rows of a batch are gathered to be read."
    portable = True

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """A store in which any request can use any of the `size.tokens` tokens, rounded up to whole blocks."""
        from attn_cache.paged import PagedKVCache
        from attn_cache.store import Store

        return Store(specs, size, PagedKVCache(specs, size))


class SharedCache(CacheFamily):
    """Like `paged`, with automatic prefix caching: equal prefixes share blocks, which outlive their requests."""

    name = "shared"
    summary = "Like paged, with prefix caching: requests share the blocks of a common prefix, also of ended requests."
    portable = True

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """Like `PagedCache.create`; blocks that no request uses keep cached prefixes."""
        from attn_cache.prefix_cache import SharedStore

        return SharedStore(specs, size)

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """See `CacheFamily.room`; adds the snapshots of fixed-size states, one per request."""
        states = [spec for layer in specs.values() for spec in layer.values() if isinstance(spec, Slot)]
        snapshots = size.requests * sum(spec.row_bytes(size.dtype) for spec in states)
        return super().room(specs, size) + snapshots


class QuantizedRowsCache(SharedCache):
    """Like `shared`, with each row quantized on its own by `quantizer`."""

    quantizer: ClassVar[Quantizer]

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """Like `SharedCache.create`; rows are quantized when they are written and dequantized when they are read."""
        from attn_cache.quantized_rows import QuantizedRowStore

        return QuantizedRowStore(specs, size, self.quantizer)

    def bytes(self, specs: ModelSpecs, *, tokens: int, source: int = 0, dtype: str) -> int:
        """See `CacheFamily.bytes`; counts codes and scales."""
        return super().bytes(quantized_specs(specs, self.quantizer), tokens=tokens, source=source, dtype=dtype)

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """See `SharedCache.room`."""
        return super().room(quantized_specs(specs, self.quantizer), size)


class Float16Cache(QuantizedRowsCache):
    """Two bytes per number: what llama.cpp keeps by default."""

    name = "float16"
    summary = "Like shared, with rows rounded to float16: half the bytes of float32."
    quantizer = Half()
    loss = 0.0005


class Int8Cache(QuantizedRowsCache):
    """One byte per number and one scale per token and head."""

    name = "int8"
    summary = "Like shared, with int8 codes and a scale for each token and head: half the bytes of bfloat16."
    quantizer = Symmetric()
    loss = 0.004


class Int4Cache(QuantizedRowsCache):
    """Four bits per number, in groups of 32 channels with a step and a lowest number each."""

    name = "int4"
    summary = "Like shared, with 4-bit codes in groups of 32 channels of a token: 0.3 times the bytes of bfloat16."
    quantizer = Affine(bits=4, group=32)
    loss = 0.067


class KiviCache(CacheFamily):
    """KIVI: full blocks are quantized, keys per channel and all else per token; the unfinished block is not.

    Liu et al. 2024, "KIVI", arXiv 2402.02750, with its 2 bits, groups of 32 and blocks of 128 tokens unless `layout`
    says otherwise. The paper keeps the newest values unquantized for longer than the newest keys; here both are
    quantized with their block, so that a block can be shared.
    """

    name = "kivi"
    summary = "Shared blocks of 128 tokens in 2-bit codes: keys per channel, values per token; last block unquantized."
    portable = True
    loss = 0.335

    def __init__(self, layout: KiviLayout = KiviLayout()) -> None:  # noqa: B008  (frozen)
        self.layout = layout

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """Like `SharedCache.create`, with `size.tokens` rounded up to whole blocks."""
        from attn_cache.quantized_blocks import QuantizedBlockStore

        return QuantizedBlockStore(specs, size, self.layout)

    def bytes(self, specs: ModelSpecs, *, tokens: int, source: int = 0, dtype: str) -> int:
        """See `CacheFamily.bytes`; counts codes of full blocks within the window, and the rows after them."""
        block, total = self.layout.block, 0
        for layer, states in specs.items():
            for name, spec in states.items():
                if not isinstance(spec, Paged):
                    total += spec.bytes(tokens, source, dtype)
                    continue
                first = 0 if spec.window is None else max(0, tokens - spec.window)
                full = tokens // block
                coded = self.layout.specs({layer: {name: spec}})[layer][name].row_bytes(dtype)
                total += max(0, full - first // block) * coded
                total += (tokens - max(first, full * block)) * spec.row_bytes(dtype)
        return total

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """See `SharedCache.room`; counts codes for all tokens, and one unquantized block for each request."""
        block = self.layout.block
        blocks = StoreSize(tokens=-(-size.tokens // block), requests=size.requests, dtype=size.dtype)
        newest = StoreSize(tokens=min(block * size.requests, size.tokens), requests=1, dtype=size.dtype)
        rows = {
            layer: {name: spec for name, spec in states.items() if isinstance(spec, Paged)}
            for layer, states in specs.items()
        }
        return SharedCache().room(self.layout.specs(specs), blocks) + super().room(rows, newest)


class Kivi4Cache(KiviCache):
    """Like `kivi`, with 4-bit codes."""

    name = "kivi4"
    summary = "Like kivi, with 4-bit codes."
    loss = 0.067

    def __init__(self, layout: KiviLayout = KiviLayout(bits=4)) -> None:  # noqa: B008  (frozen)
        super().__init__(layout)


@hookimpl
def attn_caches() -> list[CacheFamily]:
    """Every cache family of this package."""
    rows = [Float16Cache(), Int8Cache(), Int4Cache()]
    return [ContiguousCache(), PagedCache(), SharedCache(), *rows, KiviCache(), Kivi4Cache()]
