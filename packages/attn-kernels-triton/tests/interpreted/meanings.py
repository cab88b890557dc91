"""The weights that codes mean, read without the programs that multiply by them."""

from __future__ import annotations

import torch
from attn_kernels_triton.products import CodedLinear
from attn_models.quantization.modules import linear_of
from bounds import require_close
from torch import nn


def meaning(layer: CodedLinear) -> torch.Tensor:
    """The weights [outputs, inputs] in float64, one output and one group after another."""
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
