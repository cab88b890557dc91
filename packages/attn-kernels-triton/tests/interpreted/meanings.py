"""The weights that codes mean, read without the programs that multiply by them."""

from __future__ import annotations

import math

import torch
from attn_kernels_triton.products import CodedLinear
from attn_models.quantization.modules import linear_of
from bounds import require_close
from torch import nn


def e4m3(byte: int) -> float:
    """The number of a byte of E4M3 by its definition (arXiv 2209.05433, table 1)."""
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)
"""The number of each byte."""


def meaning(layer: CodedLinear) -> torch.Tensor:
    """The weights [outputs, inputs] in float64, one output and one group after another."""
    if layer.e4m3:
        steps = layer.steps.double().view(layer.outputs, -1).repeat_interleave(layer.group or layer.data.shape[1], 1)
        return (E4M3[layer.data.int() & 255] * steps[:, : layer.data.shape[1]])[:, : layer.inputs]
    found = torch.zeros(layer.outputs, layer.data.shape[1] * 8 // layer.bits, dtype=torch.float64)
    for output in range(layer.outputs):
        codes = layer.data[output].tolist()
        if layer.bits == 4:
            blocks = [codes[first : first + 16] for first in range(0, len(codes), 16)]
            codes = [code for block in blocks for code in [*(b & 15 for b in block), *(b >> 4 for b in block)]]
        for place, code in enumerate(codes):
            if not layer.group:
                found[output, place] = code * float(layer.steps[output])
                continue
            group = output, place // layer.group
            zero = layer.zero or 0 if layer.zeros is None else int(layer.zeros[group])
            least = 0.0 if layer.leasts is None else float(layer.leasts[group])
            found[output, place] = (code - zero) * float(layer.steps[group]) + least
    return found[:, : layer.inputs]


def require_product(layer: CodedLinear, rows: torch.Tensor) -> None:
    """Fail unless the product is nearly as close to float64 as torch's own in 16 bits with the same weights."""
    weights, bias = meaning(layer), torch.zeros(layer.outputs) if layer.bias is None else layer.bias
    short = torch.bfloat16 if rows.dtype == torch.float32 else rows.dtype
    taken = rows.to(short)
    exact = taken.double() @ weights.T + bias.double()
    plain = (taken.float() @ weights.to(short).float().T + bias).to(rows.dtype)
    require_close(layer(rows), plain, exact, f"{layer.form} {tuple(rows.shape)}")


def become_plain(packed: nn.Module) -> None:
    """Put plain weights in the place of the model's codes; all else stays as it is."""
    for name, module in list(packed.named_modules()):
        if isinstance(module, CodedLinear):
            owner, _, leaf = name.rpartition(".")
            setattr(packed.get_submodule(owner), leaf, linear_of(meaning(module).float(), module.bias))
