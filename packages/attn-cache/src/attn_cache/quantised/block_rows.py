"""Token rows whose whole blocks are kept in codes and whose newest, unfinished block is kept as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Field, Paged, RaggedBatch
from attn_core.errors import WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor, dtype

from attn_cache.bank import Key, banks, by_state, states_of, tensors_of
from attn_cache.paged import PagedRows
from attn_cache.pages import PageGroup
from attn_cache.quantised.block_states import NEWEST, visible
from attn_cache.quantised.block_step import BlockStep
from attn_cache.quantised.blocks import BlockLayout
from attn_cache.rows import fields_of
from attn_cache.zeros import lazy_zeros


class BlockRows(PagedRows):
    """Pages of one block each: `memory` holds the codes of whole blocks, `plain` the rows of unfinished ones.

    A block is coded once, from the rows that were written, when its last row comes: nothing is ever coded from codes,
    so errors do not grow. A page for its codes is held from its first row on, so that coding never lacks room; the
    page of its plain rows is then free for the next block.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, layout: BlockLayout) -> None:
        self.layout = layout
        super().__init__(layout.specs(specs), size, layout.block)
        self.fields = {(layer, state): spec.fields for layer, state, spec in states_of(specs, Paged)}
        # Plain pages are taken from the lowest on, and room is provided when it is touched: few ever are.
        self.unfinished = {window: PageGroup(None, self.pages, layout.block) for window in self.groups}
        held = [
            bank for window in self.groups for bank in banks(fields_of(specs, window), size.dtype, self._allocate_plain)
        ]
        self.plain = by_state(tensors_of(held))

    def open(self) -> None:
        """Add an empty request at the next place."""
        super().open()
        for group in self.unfinished.values():
            group.open()

    def reserve(self, place: int, tokens: int) -> bool:
        """As `PagedRows.reserve`; takes room for the plain rows of blocks that are not coded yet."""
        for group in self.unfinished.values():
            group.drop_before(place, self._computed[place])
        if not super().reserve(place, tokens):
            return False
        for group in self.unfinished.values():
            group.take(place, group.missing(place, tokens))
        return True

    def adopt(self, place: int, tokens: int, blocks: Sequence[Mapping[int | None, int]]) -> None:
        """As `PagedRows.adopt`: kept blocks are whole, so their rows are codes."""
        super().adopt(place, tokens, blocks)
        for group in self.unfinished.values():
            group.share(place, tokens // self.page, [])

    def fork(self, place: int, tokens: int) -> bool:
        """As `PagedRows.fork`; the rows of the unfinished block are copied, whole blocks are codes and shared."""
        if not super().fork(place, tokens):
            return False
        for window, group in self.unfinished.items():
            copied = group.fork(place, tokens)
            if copied is not None:
                source, copy = (self._rows_of(page) for page in copied)
                for state, fields in self.plain.items():
                    if self.windows[state] == window:
                        for rows in fields.values():
                            rows[copy] = rows[source]
        return True

    def rewind(self, place: int, tokens: int) -> None:
        """As `PagedRows.rewind`; blocks whose rows are codes by now, perhaps others' too, are left and begun anew."""
        if tokens < self.oldest_plain(place):
            for group in (*self.groups.values(), *self.unfinished.values()):
                group.cut(place, tokens)
        super().rewind(place, tokens)

    def oldest_plain(self, place: int) -> int:
        """The position from which on all rows of the request are still held as they were written."""
        firsts = [group.tables[place].first * self.page for group in self.unfinished.values()]
        return max(firsts, default=0)

    def only_chains(self) -> str | None:
        """Rows are coded as soon as a block of them is whole, so those of a tree would be coded before it is known
        which of them stay."""
        return "blocks are coded as they become whole, before it is known which tokens of a tree stay"

    def read(self, place: int, tokens: int) -> dict[Key, Tensor]:
        """Codes [blocks, ...] of the whole blocks of the first `tokens` positions that the next token can see, and the
        rows [rows, ...] after them, under the state's name with `NEWEST`.

        Raises `WrongState` where they are not computed, or rows after a whole block are codes by now.
        """
        whole = tokens // self.page * self.page
        if self.groups and (tokens > self._computed[place] or (whole < tokens and whole < self.oldest_plain(place))):
            raise WrongState(f"the rows of {tokens} tokens are needed; they are not computed, or codes by now")
        at = {window: self._lie(window, place, tokens) for window in self.groups}
        coded = {
            (*state, name): rows.index_select(0, at[self.windows[state]][0])
            for state, parts in self.memory.items()
            for name, rows in parts.items()
        }
        plain = {
            (layer, state + NEWEST, name): rows.index_select(0, at[self.windows[layer, state]][1])
            for (layer, state), fields in self.plain.items()
            for name, rows in fields.items()
        }
        return coded | plain

    def begin(self, place: int, tokens: int) -> None:
        """As `PagedRows.begin`: whole blocks are codes, so plain rows begin after them."""
        super().begin(place, tokens)
        for group in self.unfinished.values():
            group.share(place, tokens // self.page, [])

    def write(self, place: int, tokens: int, rows: Mapping[Key, Tensor]) -> None:
        """Put what `read` gave elsewhere into the reserved blocks and rows."""
        at = {window: self._lie(window, place, tokens) for window in self.groups}
        for (layer, name, field), given in rows.items():
            state = layer, name.removesuffix(NEWEST)
            blocks, newest = at[self.windows[state]]
            if name.endswith(NEWEST):
                self.plain[state][field].index_copy_(0, newest, given.to(self.device))
            else:
                self.memory[state][field].index_copy_(0, blocks, given.to(self.device))

    def close(self, place: int) -> None:
        """Free the request at `place`; the request at the last place takes it over."""
        super().close(place)
        for group in self.unfinished.values():
            group.close(place)

    def step(self, places: Sequence[int], batch: RaggedBatch) -> BlockStep:
        """One step of the requests at these places; raises `WrongState` for rows that are not held."""
        self._begin(places, batch)
        return BlockStep(self, places, batch)

    def live_bytes(self, place: int, tokens: int) -> int:
        """Bytes of the codes of whole blocks and of the plain rows after them, as far as the window reaches."""
        coded = tokens // self.page
        total = 0
        for state, parts in self.memory.items():
            window = self.windows[state]
            first = 0 if window is None else max(0, tokens - window)
            whole, plain = self.groups[window].tables[place], self.unfinished[window].tables[place]
            blocks = min(coded, whole.first + len(whole.pages)) - max(first // self.page, whole.first)
            total += max(0, blocks) * sum(rows[0].nbytes for rows in parts.values())
            rows = min(tokens, plain.end) - max(first, coded * self.page, plain.first * self.page)
            total += max(0, rows) * sum(field[0].nbytes for field in self.plain[state].values())
        return total

    def _lie(self, window: int | None, place: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The pages of the codes, and the plain rows, that the token after the first `tokens` can see."""
        whole, plain = self.groups[window].tables[place], self.unfinished[window].tables[place]
        blocks, rows = visible(tokens, window, self.page)
        pages = [whole.pages[number - whole.first] for number in blocks]
        found = ([*pages], [plain.row(position) for position in rows])
        first, second = (torch.tensor(numbers, dtype=torch.int64, device=self.device) for numbers in found)
        return first, second

    def _copy_page(self, window: int | None, source: int, copy: int) -> None:
        """An unfinished block has no codes yet."""

    def _allocate(self, count: int, field: Field, kind: dtype) -> Tensor:
        return lazy_zeros((count, 1 + self.pages, *field.shape), kind, self.device)

    def _allocate_plain(self, count: int, field: Field, kind: dtype) -> Tensor:
        return lazy_zeros((count, (1 + self.pages) * self.page, *field.shape), kind, self.device)
