"""Launches of operations on rows as models would cause them, over tensors that are never touched."""

from __future__ import annotations

import torch
from attn_core.batch import RowsInPlace
from attn_core.kernels.rowwise import Targets
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.rowwise.append import append_launch
from attn_kernels_triton.rowwise.cross_entropy import loss_launch
from attn_kernels_triton.rowwise.gate import gate_launch, ungate_launch
from attn_kernels_triton.rowwise.norm import Normed, Unnormed, norm_launch, programs_of, unnorm_launch
from attn_kernels_triton.rowwise.rotary import Rotation, rotary_launch

ROWS = 4096
JUDGED = 64


def norm_launches(width: int, dtype: torch.dtype = torch.bfloat16, rows: int = ROWS) -> list[Launch]:
    """The programs of a norm, of a sum, and of the gradients of one of a sum, which hold the most."""
    given, gain = torch.empty(rows, width, dtype=dtype), torch.empty(width, dtype=dtype)
    gains = torch.empty(programs_of(rows, width), width, dtype=torch.float32)
    return [
        norm_launch(Normed(given, None, None, gain, given), 1e-6),
        norm_launch(Normed(given, given, given, gain, given), 1e-6),
        unnorm_launch(Unnormed(given, gain, given, given, given, gains), 1e-6),
    ]


def gate_launches(activation: str, width: int = 14336, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The programs of a gate and of its gradients."""
    given = torch.empty(ROWS, width, dtype=dtype)
    return [
        gate_launch(given, given, given, activation),
        ungate_launch((given, given, given), (given, given), activation),
    ]


def rotary_launches(
    size: int, turned: int, *, interleaved: bool, dtype: torch.dtype = torch.bfloat16, heads: int = 32
) -> list[Launch]:
    """The program, forward and turning back."""
    given, turn = torch.empty(2, 2048, heads, size, dtype=dtype), torch.empty(1, 2048, turned, dtype=torch.float32)
    return [rotary_launch(given, given, Rotation(turn, turn, interleaved, back)) for back in (False, True)]


def append_launches(size: int, turned: int, *, interleaved: bool) -> list[Launch]:
    """The program that turns the heads of some tokens and writes keys and values to a cache."""
    query, key = (torch.empty(8, heads, size, dtype=torch.bfloat16) for heads in (32, 8))
    turn, memory = torch.empty(8, 1, turned), torch.empty(512, 8, size, dtype=torch.bfloat16)
    slots = torch.zeros(8, dtype=torch.int64)
    kept = RowsInPlace({"key": memory, "value": memory}, slots, slots[:, None], (0,) * 8)
    return [append_launch((query, key, key), (turn, turn), kept, query, interleaved=interleaved)]


def loss_launches(vocabulary: int, dtype: torch.dtype = torch.bfloat16, **judged) -> list[Launch]:
    """The program, with gradients and without."""
    logits, ids = torch.empty(JUDGED, vocabulary, dtype=dtype), torch.empty(JUDGED, dtype=torch.int64)
    found = torch.empty(JUDGED, dtype=torch.float32)
    return [loss_launch(logits, ids, found, Targets(**judged), gradients=both) for both in (True, False)]
