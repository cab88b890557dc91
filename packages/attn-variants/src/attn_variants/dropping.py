"""Which weights a call in training drops."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import Operands
from attn_core.dropout import Dropout

SEEDS = (1 << 63) - 1


def dropping(operands: Operands, probability: float) -> Operands:
    """The operands, of which each weight is dropped with `probability`, by a seed drawn from torch's generator.

    Where that is 0 nothing is drawn. The generator is that of the CPU whatever the device, so that nothing waits for a GPU; recomputed activations draw
    the same, as torch's checkpoint sets it back.
    """
    if not probability:
        return operands
    seed = int(torch.randint(SEEDS, (), device="cpu"))
    return dataclasses.replace(operands, dropout=Dropout(probability=probability, seed=seed))
