"""One engine step over latents: the new rows of many requests against all that they remember."""

from __future__ import annotations

from typing import Protocol

import torch
from attn_core import Fields, RaggedBatch
from attn_core.batch import PagedView, Rows
from torch import Tensor


class OverLatents(Protocol):
    """A layer whose memory is made into keys and values only where they are met."""

    def attend_start(self, query: Tensor, fresh: Fields) -> Tensor:
        """Outputs [batch, tokens, heads, value] of a sequence's first queries [batch, tokens, heads, key], over
        `fresh`, what is remembered of these tokens, [batch, tokens, ...] each."""
        ...

    def attend_rows(self, query: Tensor, remembered: Rows, positions: Tensor | None) -> Tensor:
        """Outputs [requests, query, heads, value] of queries at `positions` [requests, query], over what is remembered;
        None where each request has one query, its newest."""
        ...


def attend_new(layer: OverLatents, query: Tensor, fresh: Fields, batch: RaggedBatch, view: PagedView) -> Tensor:
    """Outputs [tokens, heads, value] of queries [tokens, heads, key]; `fresh` is in `view` already.

    Requests that compute one token each go together, others one by one.
    """
    if batch.decoding:
        return layer.attend_rows(query[:, None], view.rows(range(batch.requests)), None)[:, 0]
    pieces: list[Tensor] = [query[:0]] * batch.requests
    single = [span for span in batch.spans() if span.stop - span.start == 1]
    if single:
        places = torch.tensor([span.start for span in single], device=query.device)
        outs = layer.attend_rows(query[places, None], view.rows([span.request for span in single]), None)
        for span, out in zip(single, outs, strict=True):
            pieces[span.request] = out
    for span in batch.spans():
        if span.stop - span.start < 2:
            continue
        chunk = slice(span.start, span.stop)
        if batch.contexts[span.request] == 0:
            start = {name: rows[None, chunk] for name, rows in fresh.items()}
            pieces[span.request] = layer.attend_start(query[None, chunk], start)[0]
        else:
            rows = view.rows([span.request])
            pieces[span.request] = layer.attend_rows(query[None, chunk], rows, batch.positions[None, chunk])[0]
    return torch.cat(pieces)
