"""One engine step of a `SpecLayer`: the new tokens of many requests attend to their KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from attn_core import AttentionInputs, AttentionSpec, Fields, LayerState, RaggedBatch, Rotary
from attn_core.batch import PagedView, Rows, Span, StaticBatch
from attn_core.errors import NotGraphSafe
from attn_core.graph_safety import gathers
from attn_core.kernels.attend import Varlen
from torch import Tensor

from attn_variants.attention.kernels import InPlaceAttention
from attn_variants.attention.pinned import kept_rows
from attn_variants.compute.rotary import CosSin, cos_sin_to


class StepLayer(Protocol):
    """The interface of a layer that an engine step uses; see `attn_variants.attention.layer.SpecLayer`."""

    spec: AttentionSpec
    shares_kv: bool
    rotated: int
    last_needs_positions: bool

    def project_query(self, rows: Tensor) -> Tensor:
        """Queries [tokens, heads, key_size] of rows [tokens, hidden_size], without rotary positions."""
        ...

    def project_rotated(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Queries [tokens, heads, key_size] of rows [tokens, hidden_size], with rotary positions."""
        ...

    def project(self, rows: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [tokens, heads, size] of rows [tokens, hidden_size]."""
        ...

    def project_appended(self, rows: Tensor, cos_sin: CosSin | None, view: Any) -> Tensor | None:
        """Like `project_rotated`, and write keys and values into the cache of a view in the same kernel call; None if
        no kernel can."""
        ...

    def cache_fields(self, rows: Tensor, key: Tensor, value: Tensor, positions: Tensor | None = None) -> Fields:
        """The fields of the cache for rows [tokens, hidden_size] at `positions` [tokens] with these keys and values."""
        ...

    def part_weights(self) -> Mapping[str, Tensor]:
        """The learned tensors of score, modifiers and distribution, by name."""
        ...

    def in_place_attention(self, query: Tensor, view: Any) -> InPlaceAttention | None:
        """The cached rows of a view, with a kernel that reads them in place; None if none does."""
        ...

    def decode_in_place(self, rows: Tensor, query: Tensor, batch: RaggedBatch, view: Any) -> Tensor | None:
        """Outputs of a decode step by a module that reads chosen rows of the cache in place; None if there is none."""
        ...

    def attend(self, rows: Tensor, operands: AttentionInputs) -> Tensor:
        """Outputs [batch, query, heads, value_size]; `rows` [batch, query, hidden_size] are the inputs of the layer."""
        ...

    def attend_together(self, operands: AttentionInputs) -> Tensor | None:
        """`attend` for several documents packed end to end in one call; None if no kernel supports that."""
        ...

    def attend_last(self, rows: Tensor, operands: AttentionInputs) -> Tensor:
        """Like `attend`, for one query per sequence, which attends to all its keys."""
        ...

    def operands(
        self,
        query: Tensor,
        fields: Fields,
        key_padding_mask: Tensor | None = None,
        positions: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> AttentionInputs:
        """The inputs of attention: queries [batch, query, heads, key_size] over cached fields [batch, key, ...]."""
        ...


_COS_SIN: WeakKeyDictionary[RaggedBatch, dict[tuple[Rotary, int, torch.dtype, torch.device], CosSin]] = (
    WeakKeyDictionary()
)
"""The rotary cosines and sines of each live batch, shared by all layers of a model."""


def attend_ragged(layer: StepLayer, rows: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
    """Outputs [tokens, heads, value_size] of the new rows [tokens, hidden_size], whose keys and values are cached.

    A kernel that reads the cache in place computes all requests at once. Otherwise the cached rows are gathered: for
    requests with one new token in one batch, for the others one request at a time.
    """
    query, view, fresh = append_kv(layer, rows, batch, state)
    in_place = layer.in_place_attention(query, view)
    if isinstance(batch, StaticBatch):
        out = None if in_place is None else in_place.attend(query, batch, layer.part_weights(), ())
        if out is None and batch.decoding:
            out = attend_last(layer, rows, query, batch.positions, view.rows(range(batch.requests)))
        if out is None:
            raise NotGraphSafe(gathers("cached rows"))
        return out
    if batch.decoding and (out := layer.decode_in_place(rows, query, batch, view)) is not None:
        return out
    starts, others = ([], []) if batch.decoding else split_prefills(batch)
    if fresh is None:
        starts, others = [], list(batch.spans())
    out = None
    if in_place is not None:
        asked = range(batch.requests) if batch.decoding else [span.request for span in others]
        out = in_place.attend(query, batch, layer.part_weights(), asked)
    if out is None and batch.decoding:
        return attend_last(layer, rows, query, batch.positions, view.rows(range(batch.requests)))
    if out is None:
        out = attend_gathered(layer, (rows, query), batch, view, others)
    attend_prefills(layer, (rows, query, fresh or {}), starts, out)
    return out


def attend_prefills(layer: StepLayer, new: tuple[Tensor, Tensor, Fields], starts: Sequence[Span], out: Tensor) -> None:
    """Write the outputs of spans that start a sequence to `out`, in one kernel call if a kernel supports that.

    `new` holds the rows, queries and cache fields of all tokens.
    """
    rows, query, fields = new
    if len(starts) > 1:
        lengths = [span.stop - span.start for span in starts]
        first, last = starts[0].start, starts[-1].stop
        taken: slice | Tensor = slice(first, last)
        if sum(lengths) < last - first:
            numbers = [token for span in starts for token in range(span.start, span.stop)]
            taken = torch.tensor(numbers, device=rows.device)
        operands = layer.operands(query[None, taken], {name: field[None, taken] for name, field in fields.items()})
        together = layer.attend_together(dataclasses.replace(operands, varlen=Varlen.of(lengths)))
        if together is not None:
            out[taken] = together[0]
            return
    for span in starts:
        chunk = slice(span.start, span.stop)
        start = layer.operands(query[None, chunk], {name: field[None, chunk] for name, field in fields.items()})
        out[chunk] = layer.attend(rows[None, chunk], start)[0]


def split_prefills(batch: RaggedBatch) -> tuple[list[Span], list[Span]]:
    """Spans that start a sequence with several tokens, and the other spans.

    The former attend only to their own new keys and need not read the cache.
    """
    starts: list[Span] = []
    others: list[Span] = []
    for span in batch.spans():
        starting = span.stop - span.start > 1 and batch.contexts[span.request] == 0
        (starts if starting else others).append(span)
    return starts, others


def append_kv(
    layer: StepLayer, rows: Tensor, batch: RaggedBatch, state: LayerState
) -> tuple[Tensor, PagedView, Fields | None]:
    """Project the new rows and append their keys and values to the cache.

    Returns the queries [tokens, heads, key_size], the view of the cache that they attend to, and the appended fields.
    The fields are None if the keys and values are those of another layer or of the encoder, and if a kernel has written
    them to the cache without returning them.
    """
    if layer.spec.cross:
        return layer.project_query(rows), state["source"], None
    cos_sin, view = cos_sin_of_batch(layer, rows, batch), kept_rows(layer.spec.mask, batch, state)
    if layer.shares_kv:
        return layer.project_rotated(rows, cos_sin), view, None
    if isinstance(batch, StaticBatch):
        appended = layer.project_appended(rows, cos_sin, view)
        if appended is not None:
            return appended, view, None
    query, key, value = layer.project(rows, cos_sin)
    return query, view, view.append(layer.cache_fields(rows, key, value, batch.positions))


def attend_gathered(
    layer: StepLayer, new: tuple[Tensor, Tensor], batch: RaggedBatch, view: PagedView, spans: Sequence[Span]
) -> Tensor:
    """Outputs [tokens, heads, value_size] at these spans, uninitialised elsewhere, over gathered rows of the cache.

    `new` holds the rows and queries of all tokens.
    """
    rows, query = new
    out = query.new_empty(query.shape[0], layer.spec.heads.query, layer.spec.heads.value_size)
    single = [span for span in spans if span.stop - span.start == 1]
    if single:
        places = torch.tensor([span.start for span in single], device=rows.device)
        remembered = view.rows([span.request for span in single])
        out[places] = attend_last(layer, rows[places], query[places], batch.positions[places], remembered)
    for span in spans:
        chunk = slice(span.start, span.stop)
        if span.stop - span.start > 1:
            remembered = view.rows([span.request])
            out[chunk] = attend_chunk(layer, rows[chunk], query[chunk], batch.positions[chunk], remembered)
    return out


def attend_last(layer: StepLayer, rows: Tensor, query: Tensor, positions: Tensor, remembered: Rows) -> Tensor:
    """Outputs [requests, heads, value_size] of the newest row of each request.

    `rows` [requests, hidden_size], `query` [requests, heads, key_size], `positions` [requests]; `remembered` are the
    cached rows, the newest included.
    """
    located = (positions[:, None], key_positions(layer, remembered)) if layer.last_needs_positions else (None, None)
    operands = layer.operands(query[:, None], remembered.fields, remembered.key_padding_mask, located)
    return layer.attend_last(rows[:, None], operands)[:, 0]


def attend_chunk(layer: StepLayer, rows: Tensor, query: Tensor, positions: Tensor, remembered: Rows) -> Tensor:
    """Outputs [tokens, heads, value_size] of the consecutive new rows [tokens, hidden_size] of one request.

    `query` is [tokens, heads, key_size]; `positions` [tokens].
    """
    located = (positions[None], key_positions(layer, remembered))
    operands = layer.operands(query[None], remembered.fields, remembered.key_padding_mask, located)
    return layer.attend(rows[None], operands)[0]


def key_positions(layer: StepLayer, remembered: Rows) -> Tensor | None:
    """The positions of the cached rows; None for encoder outputs, which are counted from 0."""
    return None if layer.spec.cross else remembered.positions


def cos_sin_of_batch(layer: StepLayer, rows: Tensor, batch: RaggedBatch) -> CosSin | None:
    """Cosines and sines of the positions of the batch; None without a rotary embedding."""
    if layer.spec.rotary is None:
        return None
    return batch_cos_sin(layer.spec.rotary, layer.rotated, rows, batch)


def batch_cos_sin(rotary: Rotary, rotated: int, rows: Tensor, batch: RaggedBatch) -> CosSin:
    """Cosines and sines [tokens, 1, rotated] of a batch's positions, in the dtype and on the device of `rows`."""
    known = _COS_SIN.setdefault(batch, {})
    key = rotary, rotated, rows.dtype, rows.device
    if key not in known:
        table = cos_sin_to(rotary, rotated, batch.longest, rows)
        known[key] = table.at(batch.positions)
    return known[key]
