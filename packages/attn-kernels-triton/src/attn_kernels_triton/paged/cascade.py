"""Cascade attention: which neighbouring requests share a prefix in the KV cache, and what it saves to read that
once for all of them (Juravsky et al. 2024, arXiv 2402.05099; FlashInfer's cascade inference, arXiv 2501.01005)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from attn_core.batch import RowsInPlace
from attn_core.kernels.attend import PagedAttentionInputs

from attn_kernels_triton.paged.tiles import FEW, Heads

WORTH = 16 << 20
"""Bytes that must not be read for one launch more to pay: about what an H200 reads meanwhile. An estimate."""
MULTIPLE = 64
"""Keys of which a shared prefix is cut to a multiple: tiles of stretches stay whole."""


class SharedPrefix(NamedTuple):
    """`requests` neighbours from number `request` on, the first of which computes token `begin`, one each, whose first
    `keys` rows are the same."""

    request: int
    begin: int
    requests: int
    keys: int

    @property
    def members(self) -> range:
        """The numbers of the requests."""
        return range(self.request, self.request + self.requests)


def shared_prefixes(operands: PagedAttentionInputs, alone: Collection[int], heads: Heads) -> list[SharedPrefix]:
    """The prefixes that are to be read once for neighbours among these requests; none where it would not pay.

    Of requests that compute one token each and remember all since their first; queries of one must fill a tile of few
    rows at most. The device is asked only where contexts are so long that it could pay.
    """
    batch, rows = operands.batch, operands.rows
    single = [
        request in alone and batch.lengths[request] == 1 and not batch.path(request) and not rows.firsts[request]
        for request in range(batch.requests)
    ]
    pairs = [first for first in range(batch.requests - 1) if single[first] and single[first + 1]]
    least = {first: min(batch.contexts[first], batch.contexts[first + 1]) for first in pairs}
    price = bytes_of(rows)
    if heads.wanted or heads.group > FEW or sum(least.values()) * price < WORTH:
        return []
    same = same_until(rows, pairs, max(least.values()))
    common = {first: min(least[first], found) for first, found in zip(pairs, same, strict=True)}
    begins = [span.start for span in batch.spans()]
    return [
        SharedPrefix(first, begins[first], count, keys)
        for first, count, keys in runs(common, heads)
        if saved(count, keys, heads) * price >= WORTH
    ]


def bytes_of(rows: RowsInPlace) -> int:
    """The bytes of all fields of a row."""
    return sum(field[:1].numel() * field.element_size() for field in rows.fields.values())


def same_until(rows: RowsInPlace, pairs: Sequence[int], longest: int) -> list[int]:
    """How many rows from the first on each of these requests has in common with the next, `longest` at most."""
    first = torch.tensor(pairs, device=rows.kv_indices.device)
    differ = rows.kv_indices[first, :longest] != rows.kv_indices[first + 1, :longest]
    until = torch.where(differ.any(1), differ.int().argmax(1), differ.shape[1])
    found: list[int] = until.tolist()
    return found


def saved(count: int, keys: int, heads: Heads) -> int:
    """The keys that so many requests do not read again where they share a prefix of so many."""
    rows = count * heads.group
    tiles = -(-rows // (FEW if rows <= FEW else heads.many))
    return (count - tiles) * keys


def runs(common: dict[int, int], heads: Heads) -> list[tuple[int, int, int]]:
    """First requests, numbers of requests and keys of runs of neighbours, of which the first has so many in `common`
    with the next: each is taken in, left out, or begins a run of its own, as it saves most."""
    found: list[tuple[int, int, int]] = []
    for first in sorted(common):
        new = first, 2, common[first] // MULTIPLE * MULTIPLE
        if not found or sum(found[-1][:2]) - 1 != first:
            found.append(new)
            continue
        begin, count, keys = found.pop()
        without = [(begin, count - 1, keys)] if count > 2 else []
        choices = [[(begin, count, keys)], [(begin, count + 1, min(keys, new[2]))], [*without, new]]
        found += max(choices, key=lambda some: sum(saved(number, held, heads) for _, number, held in some))
    return [one for one in found if saved(*one[1:], heads)]
