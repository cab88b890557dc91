"""Linear layers on a GPU with weights, and optionally inputs, in FP8 (e4m3, arXiv 2209.05433)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_kernels_triton.kernels.linear_fp8 import LARGEST, LEAST, RoundedRows, round_groups, round_rows
from attn_kernels_triton.launch import Launch
from attn_kernels_triton.products import E4M3, TURN, CodedLinear, Held, bias_of, has_e4m3, linear_launches
from attn_kernels_triton.rowwise.rows import matrix, power, tile

GROUP = TURN
"""The number of inputs that share a scale where scales are per block, as in DeepSeek-V3 (arXiv 2412.19437, 3.3.2)."""
ALIGNED = 16
"""Rows of codes are padded to a multiple of this number of bytes."""
SCALE_BYTES = 4
"""The size of a scale, a float32."""
ROUNDED_WIDTH, ROUNDED_WARPS = 4096, 8
"""The number of inputs that a program quantizes at once, and its warps."""


class Rounded(NamedTuple):
    """A matrix in FP8: `codes` [row, inputs], float8_e4m3fn, times `scales` [row, groups], float32."""

    codes: Tensor
    scales: Tensor


def rounded(matrix: Tensor, group: int | None = None) -> Rounded:
    """Quantize a matrix [row, inputs] of floats to e4m3, with one scale per row or per `group` of inputs.

    The largest magnitude that shares a scale is mapped to 448, the largest number of e4m3, which has no infinity, so
    nothing overflows. NaN stays NaN; infinity becomes 448 times an infinite scale. The kernels `round_rows` and
    `round_groups` compute the same, bit for bit.
    """
    rows, inputs = matrix.shape
    wide = matrix.detach().float()
    if group is not None:
        wide = torch.nn.functional.pad(wide, (0, -inputs % group))
    apart = wide.reshape(rows, -1, group or max(1, inputs))
    highest = torch.nan_to_num(apart, nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(-1, keepdim=True)
    least, most = LEAST.value, LARGEST.value
    scales = torch.where(highest > most * least, highest / most, least)
    shares = torch.where(apart.isinf(), apart.sign() * most, apart / scales).clamp(-most, most)
    return Rounded(shares.to(E4M3).flatten(1)[:, :inputs], scales.squeeze(-1))


def round_launch(rows: Tensor, into: Rounded, group: int | None) -> Launch:
    """The launch that quantizes rows [row, inputs] into `into`, see `rounded`."""
    count, inputs = rows.shape
    groups = into.scales.shape[1]
    width = max(group or ALIGNED, min(ROUNDED_WIDTH, power(inputs)))
    call = RoundedRows(
        rows=matrix(rows),
        codes=matrix(into.codes),
        scales=matrix(into.scales),
        inputs=inputs,
        groups=groups,
        tile=tile(1, inputs, width)._replace(size=tl.constexpr(group) if group else None),
    )
    program = round_rows if group is None else round_groups
    return Launch(program=program, programs=count, call=call, warps=ROUNDED_WARPS, stages=1)


class RoundedRowsLinear(CodedLinear):
    """A `CodedLinear` with weights in e4m3 whose inputs are quantized to e4m3 by a kernel of their own (W8A8).

    Each row has one scale, or one per group of inputs where the weights have groups; sums over 128 products of codes
    are accumulated in float32. The quantization of a row depends on that row alone.
    """

    def __init__(self, held: Held, form: str) -> None:
        """Raises `InvalidValue` for weights on a GPU that cannot multiply e4m3."""
        super().__init__(held, form)
        place = held.data.device
        if place.type == "cuda" and not has_e4m3(place):
            given = f"{torch.cuda.get_device_name(place)}, {place}"
            raise InvalidValue.of("weight.device", given, "an NVIDIA GPU of compute capability 8.9 or more")

    def launches(self, rows: Tensor, out: Tensor) -> list[Launch]:
        """See `CodedLinear.launches`; the first launch quantizes the rows."""
        count, groups = len(rows), -(-self.inputs // self.group) if self.group else 1
        codes = torch.empty(count, self.data.shape[1], dtype=E4M3, device=rows.device)
        into = Rounded(codes, torch.empty(count, groups, dtype=torch.float32, device=rows.device))
        return [round_launch(rows, into, self.group), *linear_launches(codes, self.held, out, into.scales)]

    def extra_repr(self) -> str:
        """See `CodedLinear.extra_repr`."""
        return f"{super().extra_repr()}, rows=fp8"


def fp8_weights(form: str, weight: Tensor, bias: Tensor | None) -> Held:
    """Weights in an FP8 format and a bias [outputs] or None, in the layout of the kernels.

    For `fp8`, `weight` holds floats [outputs, inputs], which are quantized to e4m3 with one scale per output. The other
    formats are uint8 [outputs, bytes of a row] as stored in a file, and nothing is rounded: a float32 scale and the
    e4m3 codes of all inputs (`fp8_channel`), or blocks of a scale and the codes of 128 inputs (`fp8_block`).

    Raises `InvalidValue` for stored weights of another dtype or shape.
    """
    if form == "fp8":
        return _held(rounded(weight), bias, None)
    bytes_of = weight.shape[-1] if form == "fp8_channel" else SCALE_BYTES + GROUP
    if weight.dtype != torch.uint8 or weight.ndim != 2 or bytes_of <= SCALE_BYTES or weight.shape[1] % bytes_of:
        given = f"{weight.dtype} {list(weight.shape)}"
        raise InvalidValue.of("blocks", given, f"uint8 [outputs, a multiple of {bytes_of}], the layout of {form}")
    apart = weight.detach().reshape(len(weight), -1, bytes_of)
    scales = apart[..., :SCALE_BYTES].contiguous().view(torch.float32).squeeze(-1)
    codes = apart[..., SCALE_BYTES:].flatten(1).view(E4M3)
    return _held(Rounded(codes, scales), bias, None if form == "fp8_channel" else GROUP)


def _held(weights: Rounded, bias: Tensor | None, group: int | None) -> Held:
    """The weights in the layout of the kernels.

    A row of scales is set to NaN if one of its codes is NaN, because the kernels that widen codes would read the bits
    of such a code as a number.
    """
    codes, scales = weights
    inputs = codes.shape[1]
    bits = torch.nn.functional.pad(codes.view(torch.int8), (0, -inputs % ALIGNED))
    broken = ((bits & 0x7F) == 0x7F).any(1, keepdim=True)
    steps = torch.where(broken, torch.nan, scales)
    steps = steps.squeeze(1) if group is None else steps
    return Held(bits.contiguous(), steps.contiguous(), None, None, bias_of(bias), inputs, 8, group, e4m3=True)
