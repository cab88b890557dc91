"""`Source` states: a row per encoder token, such as keys and values of cross-attention; written once per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Fields, Source
from attn_core.batch import Rows
from attn_core.errors import InvalidValue, WrongState
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attn_cache.memory import FieldKey, StateKey, by_state, check_names, check_shape, states_of, tensor_dtype


class EncoderStates:
    """The `Source` states of all layers, one set of tensors per request; requests are identified by their index."""

    def __init__(self, specs: ModelSpecs, size: StoreSize) -> None:
        self._specs = {(layer, state): spec for layer, state, spec in states_of(specs, Source)}
        self._dtype = size.dtype
        self._device = torch.device(size.device)
        self._requests: list[dict[StateKey, dict[str, Tensor]]] = []
        self._last: dict[StateKey, tuple[tuple[int, ...], Rows]] = {}

    def add_request(self) -> None:
        """Add a request without encoder states."""
        self._requests.append({})

    def fork(self, index: int) -> None:
        """Add a request that reads the encoder states of the one at `index`; nothing is copied."""
        self._requests.append(self._requests[index])

    def write(self, index: int, source: Mapping[str, Mapping[str, Fields]]) -> None:
        """Store a copy of the encoder states of one request, layer -> state -> field [source_len, ...].

        Raises `InvalidValue` for other states than the model's.
        """
        given = {(layer, state): fields for layer, states in source.items() for state, fields in states.items()}
        if given.keys() != self._specs.keys():
            names = [".".join(key) for key in sorted(given)]
            raise InvalidValue.of("source", names, f"exactly {['.'.join(key) for key in sorted(self._specs)]}")
        self._requests[index] = {key: self._copy(key, fields) for key, fields in given.items()}

    def export_rows(self, index: int) -> dict[FieldKey, Tensor]:
        """The encoder states [source_len, ...] of the request; raises `WrongState` where they were not written."""
        if self._specs and not self._requests[index]:
            raise WrongState("the request has no encoder states; call write_source after admit")
        return {(*key, name): rows for key, fields in self._requests[index].items() for name, rows in fields.items()}

    def import_rows(self, index: int, rows: Mapping[FieldKey, Tensor]) -> None:
        """Store a copy of what `export_rows` returned."""
        self._requests[index] = {key: self._copy(key, fields) for key, fields in by_state(rows).items()}

    def remove_request(self, index: int) -> None:
        """Free the request's encoder states; the last request takes over its index."""
        self._last.clear()
        last = self._requests.pop()
        if index < len(self._requests):
            self._requests[index] = last

    def views(self, indices: Sequence[int]) -> dict[StateKey, EncoderStateView]:
        """The views of one step; raises `WrongState` where a request has no encoder states."""
        if not self._specs:
            return {}
        if not all(self._requests[index] for index in indices):
            raise WrongState("a request of the batch has no encoder states; call write_source after admit")
        return {key: EncoderStateView(self, key, indices) for key in self._specs}

    def rows(self, key: StateKey, indices: tuple[int, ...]) -> Rows:
        """Encoder rows of these requests, [requests, longest, ...] each, padded with zeros.

        The result is kept for the next step of the same requests: encoder states never change.
        """
        last = self._last.get(key)
        if last is not None and last[0] == indices:
            return last[1]
        owned = [self._requests[index][key] for index in indices]
        lengths = [_length(fields) for fields in owned]
        positions = torch.arange(max(lengths), device=self._device).expand(len(indices), -1)
        key_padding_mask = None
        if min(lengths) < max(lengths):
            key_padding_mask = positions < torch.tensor(lengths, device=self._device)[:, None]
        fields = {name: pad_sequence([fields[name] for fields in owned], batch_first=True) for name in owned[0]}
        found = Rows(fields=fields, positions=positions, key_padding_mask=key_padding_mask)
        self._last[key] = (indices, found)
        return found

    def live_bytes(self, index: int) -> int:
        """Bytes of the encoder states of the request at `index`."""
        return sum(rows.nbytes for fields in self._requests[index].values() for rows in fields.values())

    def _copy(self, key: StateKey, fields: Fields) -> dict[str, Tensor]:
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


class EncoderStateView:
    """The view of one state of one layer in a step; implements `attn_core.batch.SourceView`."""

    def __init__(self, owner: EncoderStates, key: StateKey, indices: Sequence[int]) -> None:
        self._owner = owner
        self._key = key
        self._indices = indices

    def rows(self, requests: Sequence[int]) -> Rows:
        """The encoder rows of these requests of the batch, [requests, longest, ...] each, padded with zeros."""
        return self._owner.rows(self._key, tuple(self._indices[r] for r in requests))
