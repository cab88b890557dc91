"""Dropout of attention weights: drawing seeds, and the weights that a seed keeps."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from attn_core import AttentionInputs
from attn_core.dropout import TOGETHER, Dropout
from torch import Tensor

SEEDS = (1 << 63) - 1


def new_dropout(probability: float) -> Dropout:
    """Dropout with this probability and a new seed from torch's CPU generator.

    In a compiled graph the seed is a tensor, drawn anew in each run.
    """
    seed = torch.randint(SEEDS, (), device="cpu")
    return Dropout(probability=probability, seed=seed if torch.compiler.is_compiling() else int(seed))


def kept_weights(dropout: Dropout, weights: Tensor) -> Tensor:
    """Bool [batch, heads, query, key], True for the attention weights to keep."""
    batch, heads, queries, keys = weights.shape
    counts = batch * heads, queries, -(-keys // TOGETHER)
    row, query, four = (torch.arange(count, device=weights.device) for count in counts)
    row = (row + dropout.first * heads).view(batch, heads, 1, 1)
    word = torch.stack(dropout.words(row, query[:, None], four), dim=-1).flatten(-2)[..., :keys]
    return word >= dropout.threshold


class DropsWeights(Protocol):
    """A layer that drops attention weights with probability `dropout` while it is `training`."""

    training: bool
    dropout: float


def with_dropout(inputs: AttentionInputs, layer: DropsWeights) -> AttentionInputs:
    """The inputs with a new seed for the layer's dropout; unchanged in evaluation or if the probability is 0.

    The seed is drawn from the CPU generator on every device, which avoids a GPU synchronisation. Activations that
    `torch.utils.checkpoint` recomputes get the same seed, as it restores the generator.
    """
    if not layer.training or not layer.dropout:
        return inputs
    return dataclasses.replace(inputs, dropout=new_dropout(layer.dropout))
