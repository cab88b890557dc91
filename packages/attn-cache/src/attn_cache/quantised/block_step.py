"""One step over blocks: plain rows are written, blocks that become whole are coded, both are read as rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from attn_core import Fields, RaggedBatch
from attn_core.batch import Rows
from torch import Tensor

from attn_cache.bank import check_names, check_shape
from attn_cache.rows import first_visible
from attn_cache.step import RowsStep

if TYPE_CHECKING:
    from attn_cache.quantised.block_rows import BlockRows

Targets = tuple[Tensor, Tensor, Tensor]
"""Plain rows of the new tokens, and the plain and coded pages of the blocks that they complete."""


@dataclass(frozen=True, eq=False)
class BlockSelection:
    """What some requests see under one window, laid out [requests, longest] in one row after the other.

    `pages` are the coded blocks and `to_coded` the places of their rows; `plain` the plain rows and `to_plain` theirs.
    """

    positions: Tensor
    keep: Tensor | None
    pages: Tensor
    to_coded: Tensor
    plain: Tensor
    to_plain: Tensor


class BlockStep(RowsStep["BlockRows", BlockSelection]):
    """The requests of one step; `view` gives a layer its rows.

    A query sees codes of the blocks that were whole before its step, and the rows after them as they are.
    """

    def __init__(self, owner: BlockRows, places: Sequence[int], batch: RaggedBatch) -> None:
        super().__init__(owner, places, batch)
        self._targets: dict[int | None, Targets] = {}

    def view(self, layer: str, state: str) -> BlocksView:
        """What one layer sees of one of its states."""
        return BlocksView(self, (layer, state))

    def targets(self, window: int | None) -> Targets:
        """Where new rows go and which blocks they complete; the same for all layers of one window."""
        if window not in self._targets:
            size = self.owner.page
            rows: list[int] = []
            whole: list[tuple[int, int]] = []
            for place, context, length in zip(self.places, self.batch.contexts, self.batch.lengths, strict=True):
                plain = self.owner.unfinished[window].tables[place]
                coded = self.owner.groups[window].tables[place]
                rows += [
                    plain.pages[at // size - plain.first] * size + at % size for at in range(context, context + length)
                ]
                whole += [
                    (plain.pages[block - plain.first], coded.pages[block - coded.first])
                    for block in range(context // size, (context + length) // size)
                ]
            found = (rows, [page for page, _ in whole], [page for _, page in whole])
            self._targets[window] = tuple(self._tensor(numbers) for numbers in found)  # type: ignore[assignment]
        return self._targets[window]

    def _select(self, window: int | None, requests: tuple[int, ...]) -> BlockSelection:
        size = self.owner.page
        contexts = [self.batch.contexts[r] for r in requests]
        firsts = [first_visible(context, window) for context in contexts]
        ends = [self.batch.contexts[r] + self.batch.lengths[r] for r in requests]
        # Codes are read by whole blocks, so rows of the first one may lie before what the window shows.
        begins = [
            first // size * size if first < context // size * size else first
            for first, context in zip(firsts, contexts, strict=True)
        ]
        longest = max(end - begin for begin, end in zip(begins, ends, strict=True))
        bounds = self._tensor([*begins, *firsts, *ends]).view(3, -1, 1)
        positions = bounds[0] + torch.arange(longest, device=self.owner.device)
        keep = (positions >= bounds[1]) & (positions < bounds[2])
        pages, plain, to_coded, to_plain = [], [], [], []
        for row, (r, begin, end) in enumerate(zip(requests, begins, ends, strict=True)):
            at = row * longest - begin
            whole = max(begin, self.batch.contexts[r] // size * size)
            coded = self.owner.groups[window].tables[self.places[r]]
            pages += coded.pages[begin // size - coded.first : whole // size - coded.first]
            to_coded.append(torch.arange(at + begin, at + whole))
            newest = self.owner.unfinished[window].tables[self.places[r]]
            plain += [newest.pages[p // size - newest.first] * size + p % size for p in range(whole, end)]
            to_plain.append(torch.arange(at + whole, at + end))
        return BlockSelection(
            positions,
            None if bool(keep.all()) else keep,
            self._tensor(pages),
            torch.cat(to_coded).to(self.owner.device),
            self._tensor(plain),
            torch.cat(to_plain).to(self.owner.device),
        )

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.owner.device)


class BlocksView:
    """What one layer sees of one state; implements `attn_core.batch.PagedView`."""

    def __init__(self, step: BlockStep, key: tuple[str, str]) -> None:
        self._step = step
        self._key = key
        self._window = step.owner.windows[key]
        self._fields = step.owner.fields[key]
        self._plain = step.owner.plain[key]
        self._coded = step.owner.memory[key]

    def append(self, fields: Fields) -> Fields:
        """Remember this step's rows, [tokens, ...] each; raises `InvalidValue` for other fields or shapes."""
        check_names(".".join(self._key), fields, self._plain)
        layout = self._step.owner.layout
        targets, unfinished, whole = self._step.targets(self._window)
        for name, memory in self._plain.items():
            rows = fields[name]
            check_shape(".".join((*self._key, name)), rows, (self._step.tokens, *memory.shape[1:]))
            memory.index_copy_(0, targets, rows.detach().to(memory.dtype))
            if len(whole):
                blocks = memory.view(-1, layout.block, *memory.shape[1:]).index_select(0, unfinished)
                for part, codes in layout.encode(name, self._fields[name], blocks).items():
                    self._coded[part].index_copy_(0, whole, codes)
        return fields

    def rows(self, requests: Sequence[int]) -> Rows:
        """All rows these requests of the batch can see, [requests, longest, ...] each, padded with zeros."""
        chosen = self._step.select(self._window, requests)
        fields = {name: self._rows(name, plain, chosen) for name, plain in self._plain.items()}
        return Rows(fields=fields, positions=chosen.positions, keep=chosen.keep)

    def _rows(self, name: str, plain: Tensor, chosen: BlockSelection) -> Tensor:
        field, layout = self._fields[name], self._step.owner.layout
        rows = plain.new_zeros((chosen.positions.numel(), *field.shape))
        if len(chosen.pages):
            kept = {part: self._coded[part].index_select(0, chosen.pages) for part in layout.parts(name, field)}
            blocks = layout.decode(name, field, kept, plain.dtype)
            rows.index_copy_(0, chosen.to_coded, blocks.flatten(0, 1))
        rows.index_copy_(0, chosen.to_plain, plain.index_select(0, chosen.plain))
        return rows.view(*chosen.positions.shape, *field.shape)
