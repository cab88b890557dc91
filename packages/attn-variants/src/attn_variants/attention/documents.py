"""Whole sequences that hold several documents, packed end to end, each of which attends only to itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attn_core.errors import InvalidValue
from attn_core.graph_safety import device_cache
from attn_core.kernels.attend import Varlen, VarlenStarts
from attn_core.kernels.devices import sent
from torch import Tensor

from attn_variants.compute.constants import in_trace
from attn_variants.compute.dropout import with_dropout
from attn_variants.compute.rotary import cos_sin_to


def forward_documents(
    layer: Any,
    rows: Tensor,
    lengths: Sequence[int] | Tensor,
    others: Mapping[str, object | None],
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Self-attention within each of the documents packed end to end in `rows` [batch, sum of lengths, hidden_size].

    Positions restart at 0 in every document. Layers that compute more than their spec run one document at a time.
    With lengths as an int64 tensor [documents] on the CPU, one compiled graph serves documents of any lengths. `shared`
    says what documents have in common, for `rows` that hold it once: the places [sum of lengths] of their tokens in
    `rows`, and those of the rows in the documents [rows].
    Raises `InvalidValue` if the lengths do not sum to the number of rows, if the layer is a cross-attention, or if
    one of `others`, the further arguments of `forward` by name, is given.
    """
    given = sorted(name for name, value in others.items() if value is not None)
    if given or layer.spec.cross:
        allowed = "self-attention without further arguments"
        raise InvalidValue.of("lengths", f"lengths together with {', '.join(given) or 'a source'}", allowed)
    more = not layer.only_spec or layer.inner is not None or layer.shares_kv
    if torch.compiler.is_compiling() and isinstance(lengths, Tensor) and not more:
        return attend_documents(layer, rows, *documents_in_graph(rows, lengths))
    varlen = Varlen.of(lengths.tolist() if isinstance(lengths, Tensor) else lengths)
    tokens = rows.shape[-2] if shared is None else len(shared[0])
    if sum(varlen.keys) != tokens:
        raise InvalidValue.of("lengths", sum(varlen.keys), f"lengths that sum to the number of tokens, {tokens}")
    if more and shared is not None:
        raise InvalidValue.of("shared", "tokens", "None: the layer computes more than its spec")
    if more:
        outs = (layer(rows[..., document, :]) for document, _ in varlen.spans())
        return torch.cat([rows[..., :0, :], *outs], dim=-2)
    positions = document_positions(varlen.keys, rows.device)
    return attend_documents(layer, rows, varlen, positions if shared is None else positions[shared[1]], shared)


def attend_documents(
    layer: Any,
    rows: Tensor,
    varlen: Varlen | VarlenStarts,
    positions: Tensor,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`forward_documents` for checked lengths; `positions` [rows] are those of the rows in their documents."""
    cos_sin = None
    if layer.spec.rotary is not None:
        longest = rows.shape[-2] if isinstance(varlen, VarlenStarts) else max(varlen.keys, default=1)
        cos_sin = cos_sin_to(layer.spec.rotary, layer.rotated, longest, rows).at(positions.to(rows.device))
    query, key, value = layer.project(rows, cos_sin)
    if shared is not None:
        query, key, value = (part.index_select(-3, shared[0]) for part in (query, key, value))
    inputs = dataclasses.replace(layer.operands(query, layer.cache_fields(rows, key, value)), varlen=varlen)
    attended = layer.attend(rows, with_dropout(inputs, layer)).flatten(-2)
    out: Tensor = layer.project_output(attended if shared is None else attended.index_select(-2, shared[1]))
    return out


def documents_in_graph(rows: Tensor, lengths: Tensor) -> tuple[VarlenStarts, Tensor]:
    """The document starts and row positions, which restart at 0 in each document, computed inside a compiled graph.

    `lengths` [documents] is an int64 tensor on the CPU.
    """
    ends = lengths.cumsum(0)
    first = torch.repeat_interleave(ends - lengths, lengths, output_size=rows.shape[-2])
    starts = torch.nn.functional.pad(ends, (1, 0))
    return VarlenStarts(starts, starts), torch.arange(rows.shape[-2], device=first.device) - first


def document_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Positions [rows], int64, of documents of these lengths packed end to end; they restart at 0 in each document.

    The tensor is cached, so that all layers of a batch share it, and is copied to a GPU without synchronising.
    """
    return _counted(lengths).to(device) if in_trace() else _document_positions(lengths, device)


@device_cache(8)
def _document_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    # A tensor made in inference mode could not take part in training later.
    with torch.inference_mode(mode=False):
        return sent(_counted(lengths), device)


def _counted(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([position for length in lengths for position in range(length)], dtype=torch.int64)
