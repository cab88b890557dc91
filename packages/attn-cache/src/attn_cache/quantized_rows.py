"""A paged KV cache that encodes every row on its own (float16, int8, int4), once, when it is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attn_core import Field, Fields, Paged, RaggedBatch
from attn_core.batch import ModelState, PagedView, Rows, RowsInPlace
from attn_core.stores import ModelSpecs, StaticStep, StoreSize
from torch import Tensor

from attn_cache.memory import check_names, check_shape, states_of, tensor_dtype
from attn_cache.prefix_cache import SharedStore
from attn_cache.quantization import Quantizer, is_quantized, part_name, quantized_specs


class QuantizedRowStore(SharedStore):
    """A prefix-sharing store of quantized rows; its views accept and return dequantized rows.

    The codes of a row depend on that row alone, not on how a prompt was chunked or which requests share it.
    """

    def __init__(self, specs: ModelSpecs, size: StoreSize, quantizer: Quantizer) -> None:
        super().__init__(quantized_specs(specs, quantizer), size)
        self._fields = {
            (layer, state): {
                name: QuantizedField(name, field, quantizer, size.dtype) for name, field in spec.fields.items()
            }
            for layer, state, spec in states_of(specs, Paged)
        }

    def view(self, batch: RaggedBatch, requests: Sequence[int]) -> ModelState:
        """See `Store.view`."""
        return self._dequantized(super().view(batch, requests))

    def static_step(self, tokens: int, requests: int, longest: int) -> StaticStep:
        """See `Store.static_step`; the views quantize and dequantize like those of any step."""
        return QuantizedStep(super().static_step(tokens, requests, longest), self._dequantized)

    def _dequantized(self, views: ModelState) -> ModelState:
        return {
            layer: {state: self._dequantizing(layer, state, view) for state, view in states.items()}
            for layer, states in views.items()
        }

    def _dequantizing(self, layer: str, state: str, view: Any) -> Any:
        fields = self._fields.get((layer, state))
        return view if fields is None else QuantizedRowsView(f"{layer}.{state}", view, fields)


class QuantizedStep:
    """Implements `attn_core.stores.StaticStep` over a `StaticStep` of quantized parts.

    `dequantized` turns views of the parts into views of rows.
    """

    def __init__(self, parts: StaticStep, dequantized: Callable[[ModelState], ModelState]) -> None:
        self._dequantized = dequantized
        self._parts = parts
        self.load, self.tokens, self.batch = parts.load, parts.tokens, parts.batch

    def view(self, size: int, max_query_len: int) -> ModelState:
        """See `StaticStep.view`."""
        return self._dequantized(self._parts.view(size, max_query_len))


class QuantizedField:
    """One field of a state: encodes its rows as parts and decodes them; `form` as in `attn_core.batch.RowsInPlace`."""

    def __init__(self, name: str, field: Field, quantizer: Quantizer, dtype: str) -> None:
        self.name = name
        self.shape = field.shape
        self._quantizer = quantizer if is_quantized(field) else None
        self._dtype = tensor_dtype(field.dtype or dtype)
        self._parts = tuple(quantizer.parts(field.shape)) if is_quantized(field) else ()
        self.form = quantizer.form if is_quantized(field) else None

    def encode(self, rows: Tensor) -> dict[str, Tensor]:
        """The parts of rows [tokens, *shape]."""
        if self._quantizer is None:
            return {self.name: rows}
        parts = self._quantizer.encode(rows.detach())
        return {part_name(self.name, part): numbers for part, numbers in parts.items()}

    def decode(self, stored: Fields) -> Tensor:
        """The dequantized rows [requests, longest, *shape]."""
        if self._quantizer is None:
            return stored[self.name]
        parts = {part: stored[part_name(self.name, part)] for part in self._parts}
        return self._quantizer.decode(parts, self.shape[-1], self._dtype)


class QuantizedRowsView:
    """The view of one state of one layer in a step; implements `attn_core.batch.PagedView` over a view of the parts."""

    def __init__(self, where: str, view: PagedView, fields: Mapping[str, QuantizedField]) -> None:
        self._where = where
        self._view = view
        self._fields = fields

    def append(self, fields: Fields) -> Fields:
        """Write this step's rows, [tokens, ...] each, and return them as `rows` will return them (dequantized).

        Raises `InvalidValue` for other fields or shapes.
        """
        check_names(self._where, fields, self._fields)
        parts: dict[str, Tensor] = {}
        for name, field in self._fields.items():
            check_shape(f"{self._where}.{name}", fields[name], (len(fields[name]), *field.shape))
            parts |= field.encode(fields[name])
        self._view.append(parts)
        return {name: field.decode(parts) for name, field in self._fields.items()}

    def rows(self, requests: Sequence[int]) -> Rows:
        """The dequantized rows these requests attend to, [requests, longest, ...] each."""
        stored = self._view.rows(requests)
        fields = {name: field.decode(stored.fields) for name, field in self._fields.items()}
        return Rows(fields=fields, positions=stored.positions, key_padding_mask=stored.key_padding_mask)

    def coded_in_place(self) -> RowsInPlace | None:
        """Addresses of the parts of all requests of the batch, for kernels that dequantize; None if none can."""
        forms = {field.form for field in self._fields.values()}
        form = forms.pop() if len(forms) == 1 else None
        found: RowsInPlace | None = None if form is None else self._view.in_place()  # type: ignore[attr-defined]
        return None if form is None or found is None else dataclasses.replace(found, form=form)
