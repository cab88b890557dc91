"""What the exported state of a request must look like in a store of given specs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping

from attn_core import Paged, Slot, Source, StateSpec
from attn_core.errors import StateInvalid
from attn_core.states import dtype_name
from attn_core.stores import ModelSpecs
from torch import Tensor

from attn_cache.bank import Key, states_of, tensor_dtype
from attn_cache.rows import first_visible

States = dict[str, dict[str, object]]
"""Kind, extent and fields (element type and shape of a row) of every state by `layer/state`."""


class StateLayout:
    """The states of a model whose element type is `dtype`, and the tensors that hold one request of them."""

    def __init__(self, specs: ModelSpecs, dtype: str) -> None:
        self.dtype = dtype_name(dtype)
        self._specs = [(layer, state, spec) for layer, state, spec in states_of(specs, StateSpec)]
        self.states: States = {f"{layer}/{state}": self._described(spec) for layer, state, spec in self._specs}
        written = json.dumps(self.states, sort_keys=True)
        self.fingerprint = hashlib.sha256(written.encode()).hexdigest()

    def check(self, tokens: int, rows: Mapping[str, Tensor]) -> dict[Key, Tensor]:
        """The rows by layer, state and field; raises `StateInvalid` naming the first that is not as it must be."""
        found: dict[Key, Tensor] = {}
        for key, spec, name in self._fields():
            if name not in rows:
                raise StateInvalid.of(f"field {name}", "is missing", "every field of every state")
            given, field = rows[name], spec.fields[key[2]]
            dtype, shape = tensor_dtype(field.dtype or self.dtype), field.shape
            if not isinstance(spec, Slot):
                shape = (self._count(spec, tokens, rows[f"{key[0]}/{key[1]}/{next(iter(spec.fields))}"]), *shape)
            if given.dtype != dtype or tuple(given.shape) != shape:
                raise StateInvalid.of(f"field {name}", f"{given.dtype} {tuple(given.shape)}", f"{dtype} {shape}")
            found[key] = given
        unknown = sorted(rows.keys() - {name for _, _, name in self._fields()})
        if unknown:
            raise StateInvalid.of(f"field {unknown[0]}", "belongs to no state of the store", "its fields only")
        return found

    def only(self, rows: Mapping[Key, Tensor], kind: type[StateSpec]) -> dict[Key, Tensor]:
        """Those of the rows that belong to states of one kind."""
        return {key: rows[key] for key, spec, _ in self._fields() if isinstance(spec, kind)}

    def differing(self, states: Mapping[str, object]) -> str:
        """The first state, by name, that is not the same in `states`."""
        names = sorted(self.states.keys() | states.keys())
        return next((name for name in names if self.states.get(name) != states.get(name)), "none")

    def _described(self, spec: StateSpec) -> dict[str, object]:
        kind = next(kind for kind in (Paged, Slot, Source) if isinstance(spec, kind))
        extent = {"window": spec.window} if isinstance(spec, Paged) else {}
        if isinstance(spec, Source):
            extent = {"rows": spec.rows}
        fields = {
            name: [dtype_name(field.dtype or self.dtype), list(field.shape)] for name, field in spec.fields.items()
        }
        return {"kind": kind.__name__.lower(), **extent, "fields": fields}

    def _fields(self) -> Iterator[tuple[Key, StateSpec, str]]:
        for layer, state, spec in self._specs:
            for field in spec.fields:
                yield (layer, state, field), spec, f"{layer}/{state}/{field}"

    def _count(self, spec: StateSpec, tokens: int, first: Tensor) -> int:
        if isinstance(spec, Paged):
            return tokens - first_visible(tokens, spec.window)
        if isinstance(spec, Source) and spec.rows is not None:
            return spec.rows
        return first.shape[0] if first.ndim else 0
