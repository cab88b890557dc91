"""Weights in the blocks of files, taken apart into codes and what they share, as products on a GPU read them.

Nothing is rounded: a weight means the number that the file says. Formats:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h, and `INT4_ZEROS` of attn_models.weights.block_layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_kernels_triton.products import GROUP, CodedLinear, Held, bias_of, nibbles

SUPER = 256
"""Inputs of a block of Q4_K and Q6_K."""


@dataclass(frozen=True)
class StoredForm:
    """A kind of blocks: how many `inputs` lie in so many bytes, `nbytes`, and how blocks [outputs, blocks, nbytes] are
    taken apart."""

    inputs: int
    nbytes: int
    parts: Callable[[Tensor], Parts]


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Fields of `Held` that blocks say: `data` [outputs, width], the others [outputs, groups] of `group` inputs."""

    data: Tensor
    steps: Tensor
    leasts: Tensor | None = None
    zeros: Tensor | None = None
    bits: int = 4
    group: int = GROUP
    zero: int | None = None


def stored_linear(form: str, blocks: Tensor, bias: Tensor | None) -> CodedLinear:
    """A layer over weights uint8 [outputs, bytes of a row] of a format, a bias [outputs] or None.

    Codes of Q4_0, Q4_1 and four bits with zeros keep their bytes, apart from the scales between them; those of Q4_K
    come into the same order; those of Q6_K take a byte each, as the programs take four bits or eight. Steps that are
    products of two numbers are float32, which holds them exactly.

    Raises `InvalidValue` for bytes that are no rows of whole blocks.
    """
    kind = STORED_FORMS[form]
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] % kind.nbytes:
        given = f"{blocks.dtype} {list(blocks.shape)}"
        raise InvalidValue.of("blocks", given, f"uint8 [outputs, a multiple of {kind.nbytes}], as {form} has them")
    count = blocks.shape[1] // kind.nbytes
    parts = kind.parts(blocks.detach().reshape(len(blocks), count, kind.nbytes))
    held = Held(
        data=parts.data.contiguous(),
        steps=parts.steps.contiguous(),
        leasts=parts.leasts,
        zeros=parts.zeros,
        bias=bias_of(bias),
        inputs=count * kind.inputs,
        bits=parts.bits,
        group=parts.group,
        zero=parts.zero,
    )
    return CodedLinear(held, form)


def _half(blocks: Tensor, place: int) -> Tensor:
    """The half floats [outputs, blocks] that begin at a byte of each block."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).squeeze(-1)


def _of_bytes(blocks: Tensor) -> Parts:
    """Q8_0: a step, then 32 codes of a byte."""
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return Parts(data=codes.flatten(1), steps=_half(blocks, 0), bits=8)


def _of_nibbles(blocks: Tensor, *, begin: int, zero: int | None = None) -> Parts:
    """A step, where `begin` leaves room a least value or a byte that means zero, then 16 bytes with 32 codes."""
    leasts = _half(blocks, 2) if begin == 4 else None
    zeros = blocks[..., 2].contiguous() if begin == 3 else None
    data = blocks[..., begin:].flatten(1)
    return Parts(data=data, steps=_half(blocks, 0), leasts=leasts, zeros=zeros, zero=zero)


def _of_q4_k(blocks: Tensor) -> Parts:
    """Two half floats, by which 8 steps and 8 distances of 6 bits are multiplied, then 128 bytes with 256 codes."""
    first, middle, last = (blocks[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    scales = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], dim=-1).float()
    distances = torch.cat([middle & 63, (last >> 4) | (middle >> 6 << 4)], dim=-1).float()
    steps = _half(blocks, 0).float().unsqueeze(-1) * scales
    leasts = -(_half(blocks, 2).float().unsqueeze(-1) * distances)
    # 64 inputs in 32 bytes, the first 32 in their lower bits.
    codes = blocks[..., 16:].reshape(len(blocks), -1, GROUP)
    codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1, 2)
    return Parts(data=nibbles(codes), steps=steps.flatten(1), leasts=leasts.flatten(1))


def _of_q6_k(blocks: Tensor) -> Parts:
    """128 bytes with the lower four bits of 256 codes, 64 with the upper two, 16 steps of a byte, and a half float."""
    lower = blocks[..., :128].reshape(len(blocks), -1, 2, 64)
    upper = blocks[..., 128:192].reshape(len(blocks), -1, 2, 32)
    fours = torch.cat([lower & 15, lower >> 4], dim=-1)
    twos = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    codes = (fours | twos << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    steps = _half(blocks, 208).float().unsqueeze(-1) * scales
    return Parts(data=codes.flatten(1), steps=steps.flatten(1), bits=8, group=16)


STORED_FORMS: Mapping[str, StoredForm] = {
    "q8_0": StoredForm(GROUP, 34, _of_bytes),
    "q4_0": StoredForm(GROUP, 18, partial(_of_nibbles, begin=2, zero=8)),
    "q4_1": StoredForm(GROUP, 20, partial(_of_nibbles, begin=4)),
    "q4_k": StoredForm(SUPER, 144, _of_q4_k),
    "q6_k": StoredForm(SUPER, 210, _of_q6_k),
    "int4_zeros": StoredForm(GROUP, 19, partial(_of_nibbles, begin=3)),
}
"""By the format's name, of `attn_core.kernels.linear.BLOCK_FORMATS`."""
