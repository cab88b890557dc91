"""Cascade attention: which neighbouring requests share a prefix in the KV cache, and whether to read it once for all
of them (Juravsky et al. 2024, arXiv 2402.05099; FlashInfer's cascade inference, arXiv 2501.01005)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from attn_core.batch import RowsInPlace
from attn_core.kernels.attend import PagedAttentionInputs

from attn_kernels_triton.paged.tiles import SMALL_TILE, Heads

WORTH = 16 << 20
"""The bytes of reads that an additional launch must save: about what an H200 reads in its time. An estimate."""
MULTIPLE = 64
"""The multiple to which the keys of a shared prefix are truncated, so that splits consist of whole tiles."""


class SharedPrefix(NamedTuple):
    """A run of `requests` requests from number `request` on, whose first `keys` cache rows are the same.

    Each computes one token, the first of them token `begin`.
    """

    request: int
    begin: int
    requests: int
    keys: int

    @property
    def members(self) -> range:
        """The numbers of the requests."""
        return range(self.request, self.request + self.requests)


def shared_prefixes(operands: PagedAttentionInputs, alone: Collection[int], heads: Heads) -> list[SharedPrefix]:
    """The prefixes to read once for neighbouring requests among `alone`; empty if that would not pay.

    Considered are requests that compute one token each and have cached all their tokens, with queries that fit the
    small tile. The cache rows are compared on the device (a synchronization) only if contexts are long enough to pay.
    """
    batch, rows = operands.batch, operands.rows
    single = [
        request in alone and batch.lengths[request] == 1 and not batch.path(request) and not rows.firsts[request]
        for request in range(batch.requests)
    ]
    pairs = [first for first in range(batch.requests - 1) if single[first] and single[first + 1]]
    least = {first: min(batch.contexts[first], batch.contexts[first + 1]) for first in pairs}
    price = bytes_of(rows)
    if heads.wanted or heads.group > SMALL_TILE or sum(least.values()) * price < WORTH:
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
    """The bytes of all fields of a cache row."""
    return sum(field[:1].numel() * field.element_size() for field in rows.fields.values())


def same_until(rows: RowsInPlace, pairs: Sequence[int], longest: int) -> list[int]:
    """The length of the common prefix of each of these requests and the next one, `longest` at most."""
    first = torch.tensor(pairs, device=rows.kv_indices.device)
    differ = rows.kv_indices[first, :longest] != rows.kv_indices[first + 1, :longest]
    until = torch.where(differ.any(1), differ.int().argmax(1), differ.shape[1])
    found: list[int] = until.tolist()
    return found


def saved(count: int, keys: int, heads: Heads) -> int:
    """The number of key reads that `count` requests save if they share a prefix of `keys` keys."""
    rows = count * heads.group
    tiles = -(-rows // (SMALL_TILE if rows <= SMALL_TILE else heads.large_tile))
    return (count - tiles) * keys


def runs(common: dict[int, int], heads: Heads) -> list[tuple[int, int, int]]:
    """Runs of neighbouring requests that share a prefix: first request, number of requests, and keys.

    `common` has the length of the common prefix of a request and the next one. Greedily, each request is added to the
    run before it, left out, or begins a run of its own, whichever saves most.
    """
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
