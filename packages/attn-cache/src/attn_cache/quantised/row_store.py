"""Token rows in codes, one row at a time: what is written is coded once, and never again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from attn_core import Field, Fields, Paged, RaggedBatch
from attn_core.batch import ModelState, PagedView, Rows, RowsInPlace
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor

from attn_cache.bank import check_names, check_shape, states_of, tensor_dtype
from attn_cache.quantised.grouping import Grouping, coded
from attn_cache.quantised.row_specs import coded_specs, part_name
from attn_cache.shared import SharedStore


class CodedRowStore(SharedStore):
    """A shared store of the coded states; its views take and show plain rows.

    A row's codes depend on that row alone: they are the same however a prompt was cut into steps and whoever shares it.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, grouping: Grouping) -> None:
        super().__init__(coded_specs(specs, grouping), size)
        self._fields = {
            (layer, state): {name: RowField(name, field, grouping, size.dtype) for name, field in spec.fields.items()}
            for layer, state, spec in states_of(specs, Paged)
        }

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """See `Store.view`."""
        views = super().view(batch, requests)
        tokens = sum(batch.lengths)
        return {
            layer: {state: self._plain(layer, state, view, tokens) for state, view in states.items()}
            for layer, states in views.items()
        }

    def _plain(self, layer: str, state: str, view: Any, tokens: int) -> Any:
        fields = self._fields.get((layer, state))
        return view if fields is None else CodedRowsView(f"{layer}.{state}", view, fields, tokens)


class RowField:
    """One field of a state: its rows to parts, and back; `form` as in `RowsInPlace`, None for any other."""

    def __init__(self, name: str, field: Field, grouping: Grouping, dtype: str) -> None:
        self.name = name
        self.shape = field.shape
        self._grouping = grouping if coded(field) else None
        self._dtype = tensor_dtype(field.dtype or dtype)
        self._parts = tuple(grouping.parts(field.shape)) if coded(field) else ()
        self.form = grouping.form if coded(field) else None

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """What the store keeps of rows [tokens, *shape]."""
        if self._grouping is None:
            return {self.name: rows}
        parts = self._grouping.encode(rows.detach())
        return {part_name(self.name, part): numbers for part, numbers in parts.items()}

    def decode(self, kept: Fields) -> Tensor:
        """The rows [requests, longest, *shape] of what the store keeps."""
        if self._grouping is None:
            return kept[self.name]
        parts = {part: kept[part_name(self.name, part)] for part in self._parts}
        return self._grouping.decode(parts, self.shape[-1], self._dtype)


class CodedRowsView:
    """What one layer sees of one state; implements `attn_core.batch.PagedView`."""

    def __init__(self, where: str, view: PagedView, fields: Mapping[str, RowField], tokens: int) -> None:
        self._where = where
        self._view = view
        self._fields = fields
        self._tokens = tokens

    def append(self, fields: Fields) -> Fields:
        """Remember this step's rows, [tokens, ...] each; raises `InvalidValue` for other fields or shapes."""
        check_names(self._where, fields, self._fields)
        kept: dict[str, Tensor] = {}
        for name, field in self._fields.items():
            check_shape(f"{self._where}.{name}", fields[name], (self._tokens, *field.shape))
            kept |= field.encode(fields[name])
        self._view.append(kept)
        return {name: field.decode(kept) for name, field in self._fields.items()}

    def rows(self, requests: Sequence[int]) -> Rows:
        """As the rows of a paged store, each number off by at most what its code allows."""
        kept = self._view.rows(requests)
        fields = {name: field.decode(kept.fields) for name, field in self._fields.items()}
        return Rows(fields=fields, positions=kept.positions, keep=kept.keep)

    def coded_in_place(self) -> RowsInPlace | None:
        """Where the codes of all requests of the batch lie, for kernels that read them themselves."""
        forms = {field.form for field in self._fields.values()}
        form = forms.pop() if len(forms) == 1 else None
        found: RowsInPlace | None = None if form is None else self._view.in_place()  # type: ignore[attr-defined]
        return None if form is None or found is None else dataclasses.replace(found, form=form)
