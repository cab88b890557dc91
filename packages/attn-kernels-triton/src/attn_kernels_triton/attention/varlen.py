"""Documents (texts) in varlen layout, and the lists of their tiles that kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from attn_core import AttentionInputs, Mask
from attn_core.graph_safety import device_cache
from attn_core.kernels.attend import Varlen, known_varlen, starts
from attn_core.kernels.devices import sent
from attn_core.masks import Band, band_of, varlen_band_of
from torch import Tensor


class Text(NamedTuple):
    """A text: its batch row, where its queries and keys begin in that row, how many there are, and its number."""

    batch: int
    first_query: int
    queries: int
    first_key: int
    keys: int
    number: int


class VarlenDocuments(NamedTuple):
    """The texts of all batch rows, and the band of keys that a query sees within its own text."""

    texts: tuple[Text, ...]
    band: Band


def texts_of(mask: Mask, operands: AttentionInputs) -> VarlenDocuments | None:
    """The texts of operands in varlen layout, or of a mask that is a band within segments; else None."""
    batch, queries, keys = operands.query.shape[0], operands.query.shape[1], operands.key.shape[1]
    varlen = known_varlen(operands)
    if varlen is not None:
        band = band_of(mask)
        return None if band is None else VarlenDocuments(laid(varlen, batch), band)
    found = varlen_band_of(mask)
    # Dropout counts rows from the start of the batch row, not of the text.
    excluding = operands.key_padding_mask, operands.query_positions, operands.key_positions, operands.dropout
    if found is None or any(part is not None for part in excluding):
        return None
    return VarlenDocuments(laid(segments(found.lengths, queries, keys), batch), found.band)


@lru_cache(maxsize=64)
def laid(varlen: Varlen, batch: int) -> tuple[Text, ...]:
    """The texts of all rows of a batch, which have the same layout."""
    found = zip(starts(varlen.queries), varlen.queries, starts(varlen.keys), varlen.keys, strict=False)
    return tuple(Text(row, *text, number * batch + row) for number, text in enumerate(found) for row in range(batch))


@lru_cache(maxsize=64)
def segments(lengths: tuple[int, ...], queries: int, keys: int) -> Varlen:
    """The segments as documents, for `queries` queries that are aligned to the end of `keys` keys.

    Queries before the first key, and keys and queries behind the last segment, become documents without keys or
    without queries: they take no part.
    """
    bounds = [min(bound, keys) for bound in starts(lengths)]
    offset = keys - queries
    key_counts = [stop - start for start, stop in pairwise(bounds)]
    query_counts = [max(0, stop - offset) - max(0, start - offset) for start, stop in pairwise(bounds)]
    before, behind = max(0, -offset), keys - bounds[-1]
    return Varlen((before, *query_counts, 0, queries - before - sum(query_counts)), (0, *key_counts, behind, 0))


def longest(lengths: Iterable[int]) -> int:
    """The largest of some lengths, at least 1."""
    return max(1, *lengths, 1)


class Listed(NamedTuple):
    """The tiling of a kernel whose programs own tiles of `rows` queries, or of `rows` keys if `by_key`."""

    rows: int
    by_key: bool


@device_cache(256)
def tiles_of(texts: tuple[Text, ...], listed: Listed, device: torch.device) -> Tensor:
    """The tiles [tile, 7], int32, of all texts, see `kernels.arguments.Forward`; those of long texts come first."""
    ordered = sorted(texts, key=lambda text: -text.keys)
    found = [line for text in ordered for line in lines(text, listed)]
    return sent(torch.tensor(found, dtype=torch.int32).view(-1, 7), device)


@device_cache(64)
def whole_texts(texts: tuple[Text, ...], device: torch.device) -> Tensor:
    """The texts [text, 7], int32, each as the entry of its first tile."""
    found = [(text.batch, 0, *text[1:]) for text in texts]
    return sent(torch.tensor(found, dtype=torch.int32).view(-1, 7), device)


def lines(text: Text, listed: Listed) -> Iterator[Sequence[int]]:
    """One entry for each tile of a text; the last queries, which see most keys under a causal mask, come first."""
    count = -(-(text.keys if listed.by_key else text.queries) // listed.rows)
    order = range(count) if listed.by_key else reversed(range(count))
    return ((text.batch, block, *text[1:]) for block in order)
