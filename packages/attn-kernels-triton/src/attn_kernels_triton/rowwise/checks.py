"""What is refused of rows before anything is launched."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_kernels_triton.attention.checks import DTYPES, check_count, check_like
from attn_kernels_triton.machine import interpreted

VOCABULARY_WIDEST = 2**31 - 2**16
"""Ids up to which the last tile of a row is counted in 32 bits."""


def check_rows(name: str, rows: Tensor, widest: int = VOCABULARY_WIDEST) -> None:
    """Rows [..., width] on a GPU, of a type and width that the programs take, dense along their last axis."""
    if rows.dim() < 1 or not 1 <= rows.shape[-1] <= widest:
        raise InvalidValue.of(name, list(rows.shape), f"rows of 1 to {widest} elements")
    if rows.device.type != "cuda" and not interpreted():
        raise InvalidValue.of(f"{name}.device", str(rows.device), "a GPU: these kernels do not run on a CPU")
    if rows.dtype not in DTYPES:
        raise InvalidValue.of(f"{name}.dtype", str(rows.dtype), "float32, bfloat16 or float16")
    check_dense(name, rows)
    check_count(f"{name}: rows", rows.numel() // rows.shape[-1])


def check_same(name: str, tensor: Tensor, rows: Tensor) -> None:
    """A tensor just like the rows in shape, type and device."""
    check_like(name, tensor, tuple(rows.shape), rows.device)
    if tensor.dtype != rows.dtype:
        raise InvalidValue.of(f"{name}.dtype", str(tensor.dtype), f"{rows.dtype}, as the rows")
    check_dense(name, tensor)


def check_gain(gain: Tensor | None, rows: Tensor) -> None:
    """A factor for each element of a row, of any type that the programs take."""
    if gain is None:
        return
    check_like("gain", gain, tuple(rows.shape[-1:]), rows.device)
    if gain.dtype not in DTYPES:
        raise InvalidValue.of("gain.dtype", str(gain.dtype), "float32, bfloat16 or float16")
    check_dense("gain", gain)


def check_turns(rows: Tensor, cosines: Tensor, sines: Tensor) -> None:
    """Turns for rows [..., tokens, heads, size], of at most four axes."""
    if rows.dim() not in (3, 4):
        raise InvalidValue.of("rows", list(rows.shape), "three or four axes: batch, tokens, heads, size")
    batch, tokens, _, size = (1, *rows.shape)[-4:]
    for name, turn in (("cosines", cosines), ("sines", sines)):
        shape = tuple(turn.shape)
        fits = [(tokens, 1), (1, tokens, 1), (batch, tokens, 1)]
        if shape[:-1] not in fits or not 2 <= shape[-1] <= size or shape[-1] % 2 or shape != tuple(cosines.shape):
            raise InvalidValue.of(name, list(shape), f"[{tokens}, 1, an even number up to {size}], as the cosines")
        if turn.dtype != torch.float32 or turn.device != rows.device:
            raise InvalidValue.of(name, f"{turn.dtype} on {turn.device}", f"float32 on {rows.device}")
        if turn.requires_grad:
            raise InvalidValue.of(f"{name}.requires_grad", "True", "False: no gradient flows to angles")
        check_dense(name, turn)
    check_count("tokens of a sequence", tokens * rows.stride(-3))


def check_logits(logits: Tensor, ids: Tensor) -> None:
    """Logits [row, vocabulary] that may be overwritten, and an id for each row."""
    if logits.dim() != 2:
        raise InvalidValue.of("logits", list(logits.shape), "two axes: row, vocabulary")
    check_rows("logits", logits)
    check_like("ids", ids, (logits.shape[0],), logits.device)
    if ids.dtype != torch.int64:
        raise InvalidValue.of("ids.dtype", str(ids.dtype), "int64")
    if logits.stride(0) < logits.shape[1] and logits.shape[0] > 1:
        raise InvalidValue.of("logits.stride", list(logits.stride()), "rows that do not overlap: they are overwritten")


def check_dense(name: str, tensor: Tensor) -> None:
    """The last axis lies dense in memory."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "one that ends in 1: rows lie dense in memory")
