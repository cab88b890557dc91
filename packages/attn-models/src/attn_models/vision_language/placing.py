"""The rows, positions and groups that prompts with images give for the tokens of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from attn_core.models import PlacedRows, PromptEmbeddings
from torch import Tensor


class Part(NamedTuple):
    """The tokens of one sequence in a step: what its prompt gives, the place of the first one, how many are of known
    tokens, and how many there are with drafts."""

    given: PromptEmbeddings | None
    start: int
    length: int
    rows: int


def placed_rows(parts: Sequence[Part], positions: Tensor) -> PlacedRows:
    """What the prompts of `parts`, one of which they concern, give for the tokens of a step.

    `positions` [tokens], int64, are the positions in their sequences.
    """
    device, offset, grouped = positions.device, 0, False
    places, rows = list[int](), list[Tensor]()
    tables = [part.given.positions for part in parts if part.given is not None]
    axes = max((len(table) for table in tables if table is not None), default=0)
    own, seen = positions.repeat(axes, 1), positions.clone()
    for part in parts:
        given, span = part.given, slice(offset, offset + part.rows)
        offset += part.rows
        if given is None:
            continue
        first, last = given.within(part.start, part.length)
        places += [span.start + place - part.start for place in given.places[first:last]]
        rows.append(given.rows[first:last].to(device))
        at = positions[span]
        if given.positions is not None:
            table, count = given.positions.to(device), given.positions.shape[1]
            after = at + (table.max() + 1 - count)
            own[:, span] = torch.where(at < count, table[:, at.clamp(max=count - 1)], after)
        for begin, end in given.groups_after(part.start):
            grouped = True
            seen[span][(at >= begin) & (at < end)] = end - 1
    return PlacedRows(
        torch.tensor(places, dtype=torch.int64, device=device),
        torch.cat(rows),
        own if axes else None,
        seen if grouped else None,
    )
