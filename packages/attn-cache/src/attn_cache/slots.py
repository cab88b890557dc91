"""`Slot` states: a fixed-size state per request, such as the recurrent state of linear attention; zero at the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Field, Fields, Slot
from attn_core.batch import SlotsInPlace
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor

from attn_cache.memory import (
    FieldKey,
    StateKey,
    allocate_stacks,
    by_state,
    check_names,
    check_shape,
    field_tensors,
    lazy_zeros,
    states_of,
)

Snapshot = Sequence[Tensor]
"""A copy of the fixed-size states of one request at one step."""


class SlotStates:
    """The `Slot` states of all layers, [requests + 1, ...] each; requests are identified by their index.

    The last slot, `scrap`, belongs to no request: padding of a static step reads and writes there.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        self.scrap = size.requests
        self._device = torch.device(size.device)
        self.names: list[StateKey] = [(layer, state) for layer, state, _ in states_of(specs, Slot)]
        fields = {
            (layer, state, name): field
            for layer, state, spec in states_of(specs, Slot)
            for name, field in spec.fields.items()
        }
        self._stacks = allocate_stacks(fields, size.dtype, self._allocate)
        self._memory = by_state(field_tensors(self._stacks))

    def remove_request(self, index: int, last: int) -> None:
        """Move the states of the last request to `index` and set the last to zero."""
        for stack in self._stacks:
            stack.rows[:, index] = stack.rows[:, last]
            stack.rows[:, last].zero_()

    def fork(self, index: int, copy: int) -> None:
        """Copy the states of the request at `index` to the request at `copy`."""
        for stack in self._stacks:
            stack.rows[:, copy] = stack.rows[:, index]

    def snapshot(self, index: int) -> Snapshot:
        """A copy of the states of the request at `index`."""
        return [stack.rows[:, index].clone() for stack in self._stacks]

    def restore(self, index: int, snapshot: Snapshot) -> None:
        """Overwrite the request's states with a snapshot."""
        for stack, rows in zip(self._stacks, snapshot, strict=True):
            stack.rows[:, index] = rows

    def export_rows(self, index: int) -> dict[FieldKey, Tensor]:
        """The states of the request at `index`, views of the memory."""
        return {(*key, name): rows[index] for key, fields in self._memory.items() for name, rows in fields.items()}

    def import_rows(self, index: int, rows: Mapping[FieldKey, Tensor]) -> None:
        """Overwrite the request's states with what `export_rows` returned."""
        for (layer, state, name), given in rows.items():
            self._memory[layer, state][name][index] = given.to(self._device)

    def views(self, indices: Sequence[int]) -> dict[StateKey, SlotStateView]:
        """The views of one step for the requests at these indices."""
        if not self._memory:
            return {}
        return self.views_at(torch.tensor(indices, dtype=torch.int64, device=self._device))

    def views_at(self, index: Tensor) -> dict[StateKey, SlotStateView]:
        """The views for indices [requests], int64, on the device, which are read whenever a view is used."""
        return {key: SlotStateView(".".join(key), memory, index) for key, memory in self._memory.items()}

    def live_bytes(self, index: int) -> int:
        """Bytes of the states of the request at `index`."""
        return sum(rows[index].nbytes for fields in self._memory.values() for rows in fields.values())

    def _allocate(self, count: int, field: Field, dtype: torch.dtype) -> Tensor:
        return lazy_zeros((count, self.scrap + 1, *field.shape), dtype, self._device)


class SlotStateView:
    """The view of one state of one layer in a step; implements `attn_core.batch.SlotView` and `InPlaceSlotView`."""

    def __init__(self, name: str, memory: Mapping[str, Tensor], index: Tensor) -> None:
        self._name = name
        self._memory = memory
        self._index = index

    def read(self) -> Fields:
        """A copy of the state of every request of the batch, [requests, ...] each."""
        return {name: memory.index_select(0, self._index) for name, memory in self._memory.items()}

    def in_place(self) -> SlotsInPlace:
        """The stored states of all requests of the batch."""
        return SlotsInPlace(self._memory, self._index)

    def write(self, fields: Fields) -> None:
        """Replace the state of every request; raises `InvalidValue` for other fields or shapes."""
        check_names(self._name, fields, self._memory)
        for name, memory in self._memory.items():
            rows = fields[name]
            check_shape(f"{self._name}.{name}", rows, (len(self._index), *memory.shape[1:]))
            memory.index_copy_(0, self._index, rows.detach().to(memory.dtype))
