"""States of fixed size per request, such as the sums of linear attention; zero when a request begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Field, Fields, Slot
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor

from attn_cache.bank import Key, banks, by_state, check_names, check_shape, states_of, tensors_of
from attn_cache.zeros import lazy_zeros

Snapshot = Sequence[Tensor]
"""The states of fixed size of one request at one moment."""


class FixedStates:
    """The `Slot` states of all layers, [places, ...] each."""

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        self._places = size.requests
        self._device = torch.device(size.device)
        fields = {
            (layer, state, name): field
            for layer, state, spec in states_of(specs, Slot)
            for name, field in spec.fields.items()
        }
        self._banks = banks(fields, size.dtype, self._allocate)
        self._memory = by_state(tensors_of(self._banks))

    def close(self, place: int, last: int) -> None:
        """Zero the request's states; those of the last place move here."""
        for bank in self._banks:
            bank.rows[:, place] = bank.rows[:, last]
            bank.rows[:, last].zero_()

    def fork(self, place: int, copy: int) -> None:
        """Give the request at the place `copy` the states of the one at `place`."""
        for bank in self._banks:
            bank.rows[:, copy] = bank.rows[:, place]

    def snapshot(self, place: int) -> Snapshot:
        """A copy of the states of the request at `place`."""
        return [bank.rows[:, place].clone() for bank in self._banks]

    def restore(self, place: int, snapshot: Snapshot) -> None:
        """Put a snapshot in place of the request's states."""
        for bank, rows in zip(self._banks, snapshot, strict=True):
            bank.rows[:, place] = rows

    def read(self, place: int) -> dict[Key, Tensor]:
        """The states of the request at `place` by layer, state and field."""
        return {(*key, name): rows[place] for key, fields in self._memory.items() for name, rows in fields.items()}

    def write(self, place: int, rows: Mapping[Key, Tensor]) -> None:
        """Put what `read` gave elsewhere in place of the request's states."""
        for (layer, state, name), given in rows.items():
            self._memory[layer, state][name][place] = given.to(self._device)

    def views(self, places: Sequence[int]) -> dict[tuple[str, str], FixedView]:
        """The views of one step by layer and state."""
        if not self._memory:
            return {}
        index = torch.tensor(places, dtype=torch.int64, device=self._device)
        return {key: FixedView(".".join(key), memory, index) for key, memory in self._memory.items()}

    def live_bytes(self, place: int) -> int:
        """Bytes of the states of the request at `place`."""
        return sum(rows[place].nbytes for fields in self._memory.values() for rows in fields.values())

    def _allocate(self, count: int, field: Field, dtype: torch.dtype) -> Tensor:
        return lazy_zeros((count, self._places, *field.shape), dtype, self._device)


class FixedView:
    """What one layer sees of one state in a step; implements `attn_core.batch.SlotView`."""

    def __init__(self, name: str, memory: Mapping[str, Tensor], index: Tensor) -> None:
        self._name = name
        self._memory = memory
        self._index = index

    def read(self) -> Fields:
        """A copy of the state of every request of the batch, [requests, ...] each."""
        return {name: memory.index_select(0, self._index) for name, memory in self._memory.items()}

    def write(self, fields: Fields) -> None:
        """Replace the state of every request; raises `InvalidValue` for other fields or shapes."""
        check_names(self._name, fields, self._memory)
        for name, memory in self._memory.items():
            rows = fields[name]
            check_shape(f"{self._name}.{name}", rows, (len(self._index), *memory.shape[1:]))
            memory.index_copy_(0, self._index, rows.detach().to(memory.dtype))
