"""One engine step of a spec layer: the new rows of many requests against all that they remember."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from attn_core import LayerState, RaggedBatch, Rotary, Rows
from torch import Tensor

from attn_variants.compute.rotary import Turns, turns_to

if TYPE_CHECKING:
    from attn_variants.layer import SpecLayer


_TURNS: WeakKeyDictionary[RaggedBatch, dict[tuple[Rotary, int, torch.dtype, torch.device], Turns]] = WeakKeyDictionary()
"""The turns of the batches at hand: the same for all layers of a model."""


def attend_ragged(layer: SpecLayer, rows: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
    """Outputs [tokens, heads, value_size] of the new rows [tokens, width]; remembers their keys and values, if its own.

    Requests that compute one token each go through the kernel together, the others one by one.
    """
    if layer.spec.cross:
        query, view, fresh = layer.project_query(rows), state["source"], None
    else:
        turn = turns_of(layer, rows, batch)
        view, fresh = state["kv"], None
        if layer.borrows:
            query = layer.project_turned(rows, turn)
        else:
            query, key, value = layer.project(rows, turn)
            fresh = view.append({"key": key, "value": value, **layer.further(rows)})
    if batch.decoding:
        return attend_last(layer, rows, query, batch.positions, view.rows(range(batch.requests)))
    out = query.new_empty(query.shape[0], layer.spec.heads.query, layer.spec.heads.value_size)
    single = [span for span in batch.spans() if span.stop - span.start == 1]
    if single:
        places = torch.tensor([span.start for span in single], device=rows.device)
        remembered = view.rows([span.request for span in single])
        out[places] = attend_last(layer, rows[places], query[places], batch.positions[places], remembered)
    for span in batch.spans():
        chunk = slice(span.start, span.stop)
        if span.stop - span.start < 2:
            continue
        if fresh is not None and batch.contexts[span.request] == 0:
            # The start of a sequence meets nothing but itself, which is at hand, as it is remembered.
            start = layer.operands(query[None, chunk], {name: field[None, chunk] for name, field in fresh.items()})
            out[chunk] = layer.attend(rows[None, chunk], start)[0]
        else:
            remembered = view.rows([span.request])
            out[chunk] = attend_chunk(layer, rows[chunk], query[chunk], batch.positions[chunk], remembered)
    return out


def attend_last(layer: SpecLayer, rows: Tensor, query: Tensor, positions: Tensor, remembered: Rows) -> Tensor:
    """Outputs [requests, heads, value_size] of the newest row of each request.

    `rows` [requests, width], `query` [requests, heads, key_size], `positions` [requests]; `remembered` holds rows up
    to the newest.
    """
    located = (positions[:, None], remembered.positions) if layer.last_needs_positions else (None, None)
    operands = layer.operands(query[:, None], remembered.fields, remembered.keep, located)
    return layer.attend_last(rows[:, None], operands)[:, 0]


def attend_chunk(layer: SpecLayer, rows: Tensor, query: Tensor, positions: Tensor, remembered: Rows) -> Tensor:
    """Outputs [tokens, heads, value_size] of the consecutive new rows [tokens, width] of one request.

    `query` is [tokens, heads, key_size]; `positions` [tokens].
    """
    located = (positions[None], remembered.positions)
    operands = layer.operands(query[None], remembered.fields, remembered.keep, located)
    return layer.attend(rows[None], operands)[0]


def turns_of(layer: SpecLayer, rows: Tensor, batch: RaggedBatch) -> Turns | None:
    """The turns of the rows' positions; None where positions turn nothing."""
    if layer.spec.rotary is None:
        return None
    return batch_turns(layer.spec.rotary, layer.rotated, rows, batch)


def batch_turns(rotary: Rotary, rotated: int, rows: Tensor, batch: RaggedBatch) -> Turns:
    """The turns [tokens, 1, rotated] of a batch's positions, for the type and device of `rows`."""
    known = _TURNS.setdefault(batch, {})
    key = rotary, rotated, rows.dtype, rows.device
    if key not in known:
        longest = max(length + context for length, context in zip(batch.lengths, batch.contexts, strict=True))
        table = turns_to(rotary, rotated, longest, rows)
        known[key] = table.at(batch.positions)
    return known[key]
