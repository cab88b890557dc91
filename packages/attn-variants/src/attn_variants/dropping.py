"""Which weights a call in training drops."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from attn_core import AttentionInputs
from attn_core.dropout import Dropout

SEEDS = (1 << 63) - 1


class Drops(Protocol):
    """A layer that drops weights with probability `dropout`, while it is `training`."""

    training: bool
    dropout: float


def dropping(operands: AttentionInputs, layer: Drops) -> AttentionInputs:
    """The operands of whole sequences, of which the layer drops weights by a seed drawn from torch's generator.

    The generator is that of the CPU whatever the device, so that nothing waits for a GPU; activations that are computed
    again draw the same, as torch's checkpoint sets it back. Where nothing is dropped nothing is drawn.
    """
    if not layer.training or not layer.dropout:
        return operands
    if torch.compiler.is_compiling():
        # Made by a part of torch that only a process which compiles need load.
        from attn_variants.compute.uncompiled import drawn as draw
    else:
        draw = drawn
    return dataclasses.replace(operands, dropout=draw(layer.dropout))


def drawn(probability: float) -> Dropout:
    """Which weights are dropped with this probability, by a fresh seed."""
    return Dropout(probability=probability, seed=int(torch.randint(SEEDS, (), device="cpu")))
