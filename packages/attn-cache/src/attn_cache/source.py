"""Rows per source token, such as the keys and values of cross-attention: written once, then only read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Fields, Source
from attn_core.batch import Rows
from attn_core.errors import InvalidValue, WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attn_cache.bank import Key, by_state, check_names, check_shape, states_of, tensor_dtype

State = tuple[str, str]
Owned = dict[State, dict[str, Tensor]]


class SourceStates:
    """The `Source` states of all layers, request by request."""

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        self._specs = {(layer, state): spec for layer, state, spec in states_of(specs, Source)}
        self._dtype = size.dtype
        self._device = torch.device(size.device)
        self._owned: list[Owned] = []
        self._last: dict[State, tuple[tuple[int, ...], Rows]] = {}

    def open(self) -> None:
        """Add a request without a source."""
        self._owned.append({})

    def fork(self, place: int) -> None:
        """Add a request that reads the source of the one at `place`; nothing is copied."""
        self._owned.append(self._owned[place])

    def write(self, place: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Keep a copy of the source states of one request; raises `InvalidValue` for other states than the model's."""
        given = {(layer, state): fields for layer, states in source.items() for state, fields in states.items()}
        if given.keys() != self._specs.keys():
            names = [".".join(key) for key in sorted(given)]
            raise InvalidValue.of("source", names, f"exactly {['.'.join(key) for key in sorted(self._specs)]}")
        self._owned[place] = {key: self._copy(key, fields) for key, fields in given.items()}

    def read(self, place: int) -> dict[Key, Tensor]:
        """The rows [rows, ...] of the source by layer, state and field; raises `WrongState` where there is none."""
        if self._specs and not self._owned[place]:
            raise WrongState("the request has no source; write_source comes after admit")
        return {(*key, name): rows for key, fields in self._owned[place].items() for name, rows in fields.items()}

    def restore(self, place: int, rows: Mapping[Key, Tensor]) -> None:
        """Keep a copy of what `read` gave elsewhere as the source of the request at `place`."""
        self._owned[place] = {key: self._copy(key, fields) for key, fields in by_state(rows).items()}

    def close(self, place: int) -> None:
        """Forget the request's source; the last request takes over its place."""
        self._last.clear()
        last = self._owned.pop()
        if place < len(self._owned):
            self._owned[place] = last

    def views(self, places: Sequence[int]) -> dict[State, SourceRows]:
        """The views of one step by layer and state; raises `WrongState` where a source is missing."""
        if not self._specs:
            return {}
        if not all(self._owned[place] for place in places):
            raise WrongState("a request of the batch has no source; write_source comes after admit")
        return {key: SourceRows(self, key, places) for key in self._specs}

    def rows(self, key: State, places: tuple[int, ...]) -> Rows:
        """Source rows of these places, [requests, longest, ...] each; kept for the next step, as they never change."""
        last = self._last.get(key)
        if last is not None and last[0] == places:
            return last[1]
        owned = [self._owned[place][key] for place in places]
        lengths = [_length(fields) for fields in owned]
        positions = torch.arange(max(lengths), device=self._device).expand(len(places), -1)
        keep = None
        if min(lengths) < max(lengths):
            keep = positions < torch.tensor(lengths, device=self._device)[:, None]
        fields = {name: pad_sequence([fields[name] for fields in owned], batch_first=True) for name in owned[0]}
        found = Rows(fields=fields, positions=positions, keep=keep)
        self._last[key] = (places, found)
        return found

    def live_bytes(self, place: int) -> int:
        """Bytes of the source states of the request at `place`."""
        return sum(rows.nbytes for fields in self._owned[place].values() for rows in fields.values())

    def _copy(self, key: State, fields: Fields) -> dict[str, Tensor]:
        spec, where = self._specs[key], ".".join(key)
        check_names(where, fields, spec.fields)
        length = _length(fields) if spec.rows is None else spec.rows
        copies = {}
        for name, field in spec.fields.items():
            check_shape(f"{where}.{name}", fields[name], (length, *field.shape))
            dtype = tensor_dtype(field.dtype or self._dtype)
            copies[name] = fields[name].detach().to(self._device, dtype, copy=True)
        return copies


def _length(fields: Fields) -> int:
    return int(next(iter(fields.values())).shape[0])


class SourceRows:
    """What one layer sees of one state in a step; implements `attn_core.batch.SourceView`."""

    def __init__(self, owner: SourceStates, key: State, places: Sequence[int]) -> None:
        self._owner = owner
        self._key = key
        self._places = places

    def rows(self, requests: Sequence[int]) -> Rows:
        """The source rows of these requests of the batch, [requests, longest, ...] each, padded with zeros."""
        return self._owner.rows(self._key, tuple(self._places[r] for r in requests))
