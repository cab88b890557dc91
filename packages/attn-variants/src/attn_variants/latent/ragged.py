"""One engine step over latents: the new rows of many requests against all that they remember."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from attn_core import PagedView, RaggedBatch, Rows
from torch import Tensor

if TYPE_CHECKING:
    from attn_variants.latent.layer import LatentAttentionLayer

Memory = tuple[Tensor, Tensor]
"""Latents [..., tokens, latent] and turned rotary keys [..., tokens, rotated]."""


def attend_new(
    layer: LatentAttentionLayer, query: Tensor, fresh: Memory, batch: RaggedBatch, view: PagedView
) -> Tensor:
    """Outputs [tokens, heads, value] of queries [tokens, heads, key]; `fresh` is in `view` already.

    The start of a sequence is expanded, as in training; all else is absorbed: requests that compute one token each
    together, others one by one.
    """
    if batch.decoding:
        remembered = view.rows(range(batch.requests))
        return attend_remembered(layer, query[:, None], batch.positions[:, None], remembered)[:, 0]
    out = query.new_empty(*query.shape[:2], layer.sizes.value)
    single = [span for span in batch.spans() if span.stop - span.start == 1]
    if single:
        places = torch.tensor([span.start for span in single], device=query.device)
        remembered = view.rows([span.request for span in single])
        out[places] = attend_remembered(layer, query[places, None], batch.positions[places, None], remembered)[:, 0]
    for span in batch.spans():
        if span.stop - span.start < 2:
            continue
        chunk = slice(span.start, span.stop)
        if batch.contexts[span.request] == 0:
            start = fresh[0][None, chunk], fresh[1][None, chunk]
            out[chunk] = layer.attend_expanded(layer.expand(query[None, chunk], start))[0]
        else:
            rows = view.rows([span.request])
            out[chunk] = attend_remembered(layer, query[None, chunk], batch.positions[None, chunk], rows)[0]
    return out


def attend_remembered(layer: LatentAttentionLayer, query: Tensor, positions: Tensor, remembered: Rows) -> Tensor:
    """Outputs [requests, query, heads, value] of queries [requests, query, heads, key] at `positions`."""
    memory = remembered.fields["latent"], remembered.fields["rotary_key"]
    operands = dataclasses.replace(
        layer.absorb(query, memory),
        query_positions=positions,
        key_positions=remembered.positions,
        keep=remembered.keep,
    )
    return layer.attend_absorbed(operands)
