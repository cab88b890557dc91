"""Padded sequences as documents packed end to end, without padding; those that begin alike share the beginning.

Conversations of one batch share the system prompt, chosen and rejected answers the conversation before them, and
completions of one prompt all of it: in a causal model, what is computed for these tokens is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from attn_core.kernels.base import batch_invariant
from torch import Tensor, nn

from attn_models.decoder.block import Block, SharedTokens
from attn_models.decoder.mixture_of_experts import Router


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The different `tokens` [1, tokens] of documents of these `lengths`, their `positions` [tokens], which of them
    were `asked` for [places], and what documents share, if anything."""

    tokens: Tensor
    positions: Tensor
    lengths: list[int]
    asked: Tensor
    shared: SharedTokens | None


def packed_rows(tokens: Tensor, kept: Tensor, *, share: bool) -> PackedRows:
    """Pack sequences [batch, tokens], int64, of which the places `kept`, bool, are asked for; what comes after the last
    one of a sequence is left out, as it does not matter to a causal model."""
    ids, wanted = tokens.numpy(), kept.numpy()
    rows, longest = ids.shape
    columns = np.arange(longest)
    ends = (wanted * (columns + 1)).max(1)
    # A last column in which all differ, so that a difference is always found.
    unlike = np.concatenate([ids, -1 - np.arange(rows)[:, None]], 1)
    places, count = np.zeros(ids.shape, np.int64), 0
    for row, end in enumerate(ends):
        begin = 0
        if share and row:
            alike = np.minimum((unlike[:row] != unlike[row]).argmax(1), ends[:row])
            giver = alike.argmax()
            begin = min(alike[giver], end)
            places[row, :begin] = places[giver, :begin]
        places[row, begin:end] = np.arange(count, count + end - begin)
        count += end - begin
    real = columns < ends[:, None]
    index = places[real]
    first = np.unique(index, return_index=True)[1]
    return PackedRows(
        torch.from_numpy(ids[real][first])[None],
        torch.from_numpy(np.broadcast_to(columns, ids.shape)[real][first]),
        [int(end) for end in ends if end],
        torch.from_numpy(places[wanted]),
        SharedTokens(torch.from_numpy(index), torch.from_numpy(first)) if count < len(index) else None,
    )


def packs(model: Any, kept: Tensor) -> bool:
    """Whether a decoder computes packed sequences as it does padded ones, and in less time: on a CPU, eagerly, with
    layers that compute all documents together and count no tokens."""
    return (
        kept.device.type == "cpu"
        and model.places is None
        and not torch.compiler.is_compiling()
        and not batch_invariant()
        and all(_packs(block) for block in model.blocks)
        and not any(isinstance(part, Router) or hasattr(part, "take_auxiliary_loss") for part in model.modules())
    )


def _packs(block: Any) -> bool:
    layer = block.attention
    together = getattr(layer, "takes_lengths", False) and getattr(layer, "only_spec", False) and layer.inner is None
    return type(block).forward is Block.forward and together and block._compiled_call_impl is None  # noqa: SLF001


def drops(model: nn.Module) -> bool:
    """Whether a model drops elements now: then no two tokens are alike."""
    rates = (part.p if isinstance(part, nn.Dropout) else getattr(part, "dropout", 0.0) for part in model.modules())
    return model.training and any(isinstance(rate, float) and rate > 0 for rate in rates)
