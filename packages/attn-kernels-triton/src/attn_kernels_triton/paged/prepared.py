"""What the layers of a step have in common: how their work is cut, checked against memory once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from attn_core import RaggedBatch
from attn_core.batch import RowsInPlace
from attn_core.errors import InvalidValue
from attn_core.kernels.paged import PagedOperands
from torch import Tensor

from attn_kernels_triton.launch import integers
from attn_kernels_triton.paged.items import Heads, Work, asked_of, works
from attn_kernels_triton.paged.trees import grove_of


class Tables(NamedTuple):
    """Row numbers [request, place] from positions `firsts` on, int32; of trees `bases` and `seen` too, see `Grove`."""

    numbers: Tensor
    firsts: Tensor
    bases: Tensor | None = None
    seen: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Portion:
    """`items` [item, 7] and `merges` [merge, 5], int32, of tiles of so many rows; see `programs.paged_arguments`."""

    tile: int
    items: Tensor
    merges: Tensor
    slots: int
    tables: Tables


@dataclass(frozen=True, eq=False)
class Prepared:
    """Portions of work over the row numbers that were given."""

    portions: tuple[Portion, ...]
    numbers: Tensor


Key = tuple[tuple[int, ...], Heads, int | None, int, int]

_PREPARED: WeakKeyDictionary[RaggedBatch, dict[Key, Prepared]] = WeakKeyDictionary()
"""By batch, and its requests, heads, reach, the row numbers and the rows of memory."""


def prepared(operands: PagedOperands, heads: Heads, left: int | None, rows: int) -> Prepared:
    """The work of a step over memory of so many rows; raises `InvalidValue` for row numbers outside of it."""
    known = _PREPARED.setdefault(operands.batch, {})
    numbers = operands.rows.numbers
    key = operands.requests, heads, left, id(numbers), rows
    if key not in known:
        check_numbers(operands.rows, operands.batch, rows)
        grove = grove_of(operands)
        firsts = integers(operands.rows.firsts, numbers)
        alone = set(operands.requests).difference(() if grove is None else grove.requests)
        portions = portions_of(works(asked_of(operands.batch, alone), heads, left), Tables(numbers, firsts))
        if grove is not None:
            tables = Tables(grove.numbers, grove.firsts, grove.bases, grove.seen)
            portions += portions_of(works(grove.asked, heads, left), tables)
        # The row numbers are held, so that no others can take their place in memory.
        known[key] = Prepared(tuple(portions), numbers)
    return known[key]


def portions_of(found: list[Work], tables: Tables) -> list[Portion]:
    """The work as programs read it."""
    return [
        Portion(
            work.tile,
            integers(work.items, tables.numbers),
            integers(work.merges, tables.numbers).view(-1, 5),
            work.slots,
            tables,
        )
        for work in found
    ]


def check_numbers(rows: RowsInPlace, batch: RaggedBatch, count: int) -> None:
    """Raise `InvalidValue` unless every row that a request has lies in memory of `count` rows."""
    held = [past + new - first for past, new, first in zip(batch.contexts, batch.lengths, rows.firsts, strict=True)]
    longest = max(held, default=0)
    if rows.numbers.shape[1] < longest:
        raise InvalidValue.of("rows.numbers", list(rows.numbers.shape), f"at least {longest} for each request")
    if not longest:
        return
    real = torch.arange(longest, device=rows.numbers.device) < torch.tensor(held, device=rows.numbers.device)[:, None]
    numbers = rows.numbers[:, :longest]
    outside = real & ((numbers < 0) | (numbers >= count))
    if bool(outside.any()):
        request, place = outside.nonzero()[0].tolist()
        allowed = f"rows from 0 to {count - 1}, which is all that memory has"
        raise InvalidValue.of(f"rows.numbers[{request}, {place}]", int(numbers[request, place]), allowed)
