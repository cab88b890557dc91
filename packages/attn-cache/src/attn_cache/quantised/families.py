"""The stores that keep token rows in codes, by name. Imports no torch before one is created."""

from __future__ import annotations

from typing import ClassVar

from attn_core import CacheFamily, Paged
from attn_core.stores import ModelSpecs, StateStore, StoreSize

from attn_cache.families import SharedTokens
from attn_cache.quantised.blocks import BlockLayout
from attn_cache.quantised.grouping import Affine, Grouping, Symmetric
from attn_cache.quantised.row_specs import coded_specs


class CodedRows(SharedTokens):
    """As `shared`, with each row in codes of its own; what is rounded is said by `grouping`."""

    grouping: ClassVar[Grouping]

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """As `SharedTokens.create`; rows are coded as they are written and shown as numbers again."""
        from attn_cache.quantised.row_store import CodedRowStore

        return CodedRowStore(specs, size, self.grouping)

    def bytes(self, specs: ModelSpecs, *, tokens: int, source: int = 0, dtype: str) -> int:
        """See `CacheFamily.bytes`: codes and scales."""
        return super().bytes(coded_specs(specs, self.grouping), tokens=tokens, source=source, dtype=dtype)

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """See `SharedTokens.room`."""
        return super().room(coded_specs(specs, self.grouping), size)


class Int8Tokens(CodedRows):
    """One byte a number and one scale for each token and head."""

    name = "int8"
    summary = "As shared, with int8 codes and a scale for each token and head: half the bytes of bfloat16."
    grouping = Symmetric()
    loss = 0.004


class Int4Tokens(CodedRows):
    """Four bits a number, in groups of 32 channels with a step and a lowest number each."""

    name = "int4"
    summary = "As shared, with 4-bit codes in groups of 32 channels of a token: three tenths of the bytes of bfloat16."
    grouping = Affine(bits=4, group=32)
    loss = 0.067


class Kivi(CacheFamily):
    """Keys coded by channel over groups of tokens, all else by token; the unfinished block stays as it is.

    Liu et al. 2024, "KIVI", arXiv 2402.02750, with its 2 bits, groups of 32 and blocks of 128 tokens where `layout`
    does not say otherwise. The paper keeps the newest values plain for longer than the newest keys; here both are
    coded with their block, so that a block can be shared.
    """

    name = "kivi"
    summary = (
        "Blocks of 128 tokens, shared, in 2-bit codes: keys by channel, values by token; the newest block as it is."
    )
    loss = 0.335

    def __init__(self, layout: BlockLayout = BlockLayout()) -> None:  # noqa: B008  (frozen)
        self.layout = layout

    def create(self, specs: ModelSpecs, size: StoreSize) -> StateStore:
        """As `SharedTokens.create`, with `size.tokens` rounded up to whole blocks."""
        from attn_cache.quantised.block_store import CodedBlockStore

        return CodedBlockStore(specs, size, self.layout)

    def bytes(self, specs: ModelSpecs, *, tokens: int, source: int = 0, dtype: str) -> int:
        """See `CacheFamily.bytes`: codes of whole blocks within the window, and the rows after them."""
        block, total = self.layout.block, 0
        for layer, states in specs.items():
            for name, spec in states.items():
                if not isinstance(spec, Paged):
                    total += spec.bytes(tokens, source, dtype)
                    continue
                first = 0 if spec.window is None else max(0, tokens - spec.window)
                whole = tokens // block
                coded = self.layout.specs({layer: {name: spec}})[layer][name].row_bytes(dtype)
                total += max(0, whole - first // block) * coded
                total += (tokens - max(first, whole * block)) * spec.row_bytes(dtype)
        return total

    def room(self, specs: ModelSpecs, size: StoreSize) -> int:
        """See `SharedTokens.room`: codes for all tokens, and one block of rows for each request."""
        block = self.layout.block
        whole = StoreSize(tokens=-(-size.tokens // block), requests=size.requests, dtype=size.dtype)
        newest = StoreSize(tokens=min(block * size.requests, size.tokens), requests=1, dtype=size.dtype)
        rows = {
            layer: {name: spec for name, spec in states.items() if isinstance(spec, Paged)}
            for layer, states in specs.items()
        }
        return SharedTokens().room(self.layout.specs(specs), whole) + super().room(rows, newest)


class Kivi4(Kivi):
    """As `kivi`, with 4 bits."""

    name = "kivi4"
    summary = "As kivi, with 4-bit codes."
    loss = 0.067

    def __init__(self, layout: BlockLayout = BlockLayout(bits=4)) -> None:  # noqa: B008  (frozen)
        super().__init__(layout)
