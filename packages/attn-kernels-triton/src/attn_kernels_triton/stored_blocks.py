"""Weights in the block formats of files, split into codes, steps and minima as the GPU kernels read them.

Nothing is rounded: each weight keeps the value that is stored in the file. Formats:
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
"""The number of inputs in a block of Q4_K and Q6_K."""


@dataclass(frozen=True)
class StoredForm:
    """A block format: the number of inputs and of bytes in a block, and the function that splits blocks [outputs,
    blocks, nbytes] into `Parts`."""

    inputs: int
    nbytes: int
    parts: Callable[[Tensor], Parts]


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The fields of `Held` that blocks contain: `data` [outputs, width]; the others [outputs, groups], with `group`
    inputs in a group."""

    data: Tensor
    steps: Tensor
    leasts: Tensor | None = None
    zeros: Tensor | None = None
    bits: int = 4
    group: int = GROUP
    zero: int | None = None


def stored_linear(form: str, blocks: Tensor, bias: Tensor | None) -> CodedLinear:
    """A linear layer over weights uint8 [outputs, bytes of a row] in a block format, and a bias [outputs] or None.

    Codes of Q4_0, Q4_1 and `int4_zeros` keep their bytes, without the scales between them; those of Q4_K are reordered
    likewise; those of Q6_K take one byte each, because the kernels read codes of four or eight bits. Steps that are
    products of two stored numbers become float32, which represents them exactly.

    Raises `InvalidValue` for weights that are not uint8 rows of whole blocks.
    """
    kind = STORED_FORMS[form]
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] % kind.nbytes:
        given = f"{blocks.dtype} {list(blocks.shape)}"
        raise InvalidValue.of("blocks", given, f"uint8 [outputs, a multiple of {kind.nbytes}], the layout of {form}")
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
    """The float16 numbers [outputs, blocks] at byte `place` of each block."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).squeeze(-1)


def _of_bytes(blocks: Tensor) -> Parts:
    """Q8_0 blocks: a step, then 32 codes of one byte."""
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return Parts(data=codes.flatten(1), steps=_half(blocks, 0), bits=8)


def _of_nibbles(blocks: Tensor, *, begin: int, zero: int | None = None) -> Parts:
    """Blocks of 32 codes of four bits: a step, then a minimum (`begin` 4), a zero point (`begin` 3) or nothing
    (`begin` 2), then 16 bytes of codes."""
    leasts = _half(blocks, 2) if begin == 4 else None
    zeros = blocks[..., 2].contiguous() if begin == 3 else None
    data = blocks[..., begin:].flatten(1)
    return Parts(data=data, steps=_half(blocks, 0), leasts=leasts, zeros=zeros, zero=zero)


def _of_q4_k(blocks: Tensor) -> Parts:
    """Q4_K blocks: two float16 factors, of 8 steps and of 8 negated minima with 6 bits each, then 128 bytes with 256
    codes."""
    first, middle, last = (blocks[..., 4 + 4 * part : 8 + 4 * part] for part in range(3))
    scales = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], dim=-1).float()
    distances = torch.cat([middle & 63, (last >> 4) | (middle >> 6 << 4)], dim=-1).float()
    steps = _half(blocks, 0).float().unsqueeze(-1) * scales
    leasts = -(_half(blocks, 2).float().unsqueeze(-1) * distances)
    # Each 32 bytes hold 64 inputs, the first 32 of them in the lower four bits.
    codes = blocks[..., 16:].reshape(len(blocks), -1, GROUP)
    codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1, 2)
    return Parts(data=nibbles(codes), steps=steps.flatten(1), leasts=leasts.flatten(1))


def _of_q6_k(blocks: Tensor) -> Parts:
    """Q6_K blocks: 128 bytes with the lower four bits of 256 codes, 64 bytes with their upper two bits, 16 steps of one
    byte, and the float16 factor of the steps."""
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
"""The block formats by name, see `attn_core.kernels.linear.BLOCK_FORMATS`."""
