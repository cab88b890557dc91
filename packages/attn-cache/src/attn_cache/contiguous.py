"""Token rows side by side: every request has room for the longest sequence, and a batch is read in place.

The memory of a field [heads, size] is laid out [requests, heads, positions, size], and shown as [requests, positions,
heads, size]: matrix products over positions then read it without copying.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Field, RaggedBatch
from attn_core.errors import InvalidValue, WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor

from attn_cache.bank import Bank, Key, banks, by_state, tensors_of
from attn_cache.contiguous_step import ContiguousStep
from attn_cache.rows import fields_of, first_visible, windows_of
from attn_cache.zeros import lazy_zeros


class ContiguousRows:
    """Token rows of all layers; implements `attn_cache.rows.TokenRows`.

    A window limits what is read; it frees no memory here (the paged store does that). Memory that holds no row of a
    running request is zero, so that the padding of a batch is zero too.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        self.places = size.requests
        self.capacity = size.tokens // size.requests
        if self.capacity < 1:
            raise InvalidValue.of("tokens", size.tokens, f"at least one for each of the {size.requests} requests")
        self.device = torch.device(size.device)
        self.windows = windows_of(specs)
        self.banks: list[Bank] = []
        for window in set(self.windows.values()):
            self.banks += banks(fields_of(specs, window), size.dtype, self._allocate)
        self.memory = by_state(tensors_of(self.banks))
        self._reserved: list[int] = []

    @property
    def taken(self) -> int:
        """Tokens that are reserved."""
        return sum(self._reserved) if self.memory else 0

    @property
    def total(self) -> int:
        """Tokens that can be reserved: the capacity of all places together."""
        return self.capacity * self.places

    def fits(self, tokens: int) -> bool:
        """Whether the request is no longer than a place."""
        return not self.memory or tokens <= self.capacity

    def holds(self, requests: int, tokens: int) -> bool:
        """Whether each has a place that is long enough."""
        return requests <= self.places and self.fits(tokens)

    def open(self) -> None:
        """Add an empty request at the next place."""
        self._reserved.append(0)

    def reserve(self, place: int, tokens: int) -> bool:
        """Note how far the request reaches; False beyond the capacity of a place."""
        if not self.fits(tokens):
            return False
        self._reserved[place] = max(self._reserved[place], tokens)
        return True

    def fork(self, place: int, tokens: int) -> bool:
        """Copy the first `tokens` rows to the next place."""
        copy = len(self._reserved)
        for bank in self.banks:
            bank.rows[:, copy, :tokens] = bank.rows[:, place, :tokens]
        self._reserved.append(tokens)
        return True

    def rewind(self, place: int, tokens: int) -> None:
        """Zero the rows from position `tokens` on."""
        for bank in self.banks:
            bank.rows[:, place, tokens : self._reserved[place]].zero_()

    def only_chains(self) -> str | None:
        """None: rows are found wherever they lie in their place."""
        return None

    def move(self, place: int, sources: Sequence[int], start: int) -> None:
        """Let the rows at these positions lie side by side from position `start` on."""
        taken = torch.tensor(sources, device=self.device)
        for bank in self.banks:
            bank.rows[:, place, start : start + len(sources)] = bank.rows[:, place].index_select(1, taken)

    def close(self, place: int) -> None:
        """Zero the request's rows; the rows of the last place move here."""
        last = len(self._reserved) - 1
        used, moved = self._reserved[place], self._reserved[last]
        for bank in self.banks:
            bank.rows[:, place, :used].zero_()
            if place != last:
                bank.rows[:, place, :moved] = bank.rows[:, last, :moved]
                bank.rows[:, last, :moved].zero_()
        self._reserved[place] = moved
        self._reserved.pop()

    def step(self, places: Sequence[int], batch: RaggedBatch) -> ContiguousStep:
        """One step of the requests at these places; raises `WrongState` for rows that were not reserved."""
        for request, place in enumerate(places):
            end = batch.end(request)
            if end > self._reserved[place] and self.memory:
                raise WrongState(f"{end} positions are needed, {self._reserved[place]} are reserved")
        return ContiguousStep(self, places, batch)

    def read(self, place: int, tokens: int) -> dict[Key, Tensor]:
        """The rows [rows, ...] of the first `tokens` positions that the next token can see."""
        if tokens > self._reserved[place] and self.memory:
            raise WrongState(f"the rows of {tokens} tokens are needed, {self._reserved[place]} are reserved")
        return {
            (*state, name): rows[place, first_visible(tokens, self.windows[state]) : tokens]
            for state, fields in self.memory.items()
            for name, rows in fields.items()
        }

    def begin(self, place: int, tokens: int) -> None:
        """Rows lie at their positions: nothing to note."""

    def write(self, place: int, tokens: int, rows: Mapping[Key, Tensor]) -> None:
        """Put what `read` gave elsewhere into the reserved rows."""
        for (layer, state, name), given in rows.items():
            self.memory[layer, state][name][place, tokens - len(given) : tokens] = given.to(self.device)

    def live_bytes(self, place: int, tokens: int) -> int:
        """Bytes of the last `window` of `tokens` rows of every field."""
        total = 0
        for state, fields in self.memory.items():
            window = self.windows[state]
            first = 0 if window is None else max(0, tokens - window)
            total += sum(rows[place, first:tokens].nbytes for rows in fields.values())
        return total

    def _allocate(self, count: int, field: Field, dtype: torch.dtype) -> Tensor:
        lead, rest = (field.shape[:1], field.shape[1:]) if len(field.shape) > 1 else ((), field.shape)
        memory = lazy_zeros((count, self.places, *lead, self.capacity, *rest), dtype, self.device)
        return memory.transpose(2, 3) if lead else memory
