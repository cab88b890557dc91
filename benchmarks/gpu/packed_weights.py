"""Linear layers with packed weights (int4, int8, FP8): correctness on this GPU, and speed compared with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from attn_kernels_triton.products import E4M3, TURN, CodedLinear, has_e4m3, int4_linear, int8_linear
from attn_kernels_triton.products_fp8 import (
    GROUP,
    SCALE_BYTES,
    Rounded,
    RoundedRowsLinear,
    fp8_weights,
    round_launch,
    rounded,
)
from recurrences import judged
from timing import copied_per_second, seconds
from torch import Tensor
from torch.nn import functional


def in_fp8(weight: Tensor, bias: Tensor | None, *, rows: bool = False) -> CodedLinear:
    """An FP8 layer with one scale for each output; with `rows`, the input rows are rounded to FP8 too."""
    return (RoundedRowsLinear if rows else CodedLinear)(fp8_weights("fp8", weight, bias), "fp8")


def in_blocks(weight: Tensor, bias: Tensor | None, *, rows: bool = False) -> CodedLinear:
    """An FP8 layer with blockwise scales, as in checkpoints: one for each 128 inputs of an output; `rows` as above."""
    codes, scales = rounded(weight, GROUP)
    apart = codes.view(torch.uint8).view(len(weight), -1, GROUP)
    heads = scales.contiguous().view(torch.uint8).view(len(weight), -1, SCALE_BYTES)
    held = fp8_weights("fp8_block", torch.cat([heads, apart], -1).flatten(1), bias)
    return (RoundedRowsLinear if rows else CodedLinear)(held, "fp8_block")


Maker = Callable[[Tensor, Tensor | None], CodedLinear]
MAKERS: dict[str, Maker] = {"int8": int8_linear, "int4": int4_linear, "fp8, weights alone": in_fp8}
IN_WHOLE_BLOCKS: dict[str, Maker] = {"fp8 in blocks, weights alone": in_blocks}
"""Layers for input sizes that are a multiple of 128."""
ROWS_TOO: dict[str, Maker] = {"fp8": partial(in_fp8, rows=True)}
ROWS_TOO_IN_WHOLE_BLOCKS: dict[str, Maker] = {"fp8 in blocks": partial(in_blocks, rows=True)}
"""Layers for GPUs with FP8 matrix multiplication; their input sizes must be a multiple of 128."""
STEPS = {"int4": 15, "int8": 127}
"""The number of quantisation steps over an output's range of weights; for FP8, errors are at most 1/16 of a weight."""
SMALL = ((48, 300, 70), (3, 256, 70))
JUDGED = ((1, 4096, 4096), (16, 4096, 6144), (64, 14336, 4096), (515, 4096, 1031), (3, 1000, 517))
"""Rows, inputs and outputs: of decode steps, of a prompt, and of sizes that are not multiples of a tile."""
COUNTS, LAYERS = (1, 16, 64, 512, 4096), ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""The numbers of rows, and the (inputs, outputs) of the layers of a model of eight billion parameters."""


def normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random normal numbers, the same for every call with this shape."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def meaning(layer: CodedLinear) -> Tensor:
    """The dequantised weights [outputs, inputs] in float64, obtained as the layer's product with an identity matrix.

    Its rows are float32, so that the outputs are too; ones are exact even if they are rounded to bfloat16.
    """
    found = [layer(rows).T for rows in torch.eye(layer.inputs, device=layer.data.device).split(64 * TURN)]
    return torch.cat(found, dim=1).double()


def makers(device: str, inputs: int) -> dict[str, Maker]:
    """The functions that make layers on this device for this number of inputs, by format."""
    found, whole = dict(MAKERS), inputs % GROUP == 0
    found |= IN_WHOLE_BLOCKS if whole else {}
    if has_e4m3(torch.device(device)):
        found |= ROWS_TOO | (ROWS_TOO_IN_WHOLE_BLOCKS if whole else {})
    return found


def taken(layer: CodedLinear, rows: Tensor) -> Tensor:
    """The input rows as a layer multiplies them: rounded to FP8 in plain torch, or unchanged."""
    if not isinstance(layer, RoundedRowsLinear):
        return rows
    codes, scales = rounded(rows, layer.group)
    return codes.float() * scales.repeat_interleave(layer.group or layer.inputs, 1)[:, : layer.inputs]


def off(form: str, weights: Tensor, weight: Tensor) -> dict[str, Any]:
    """The largest error of dequantised weights, in quantisation steps, or for FP8 in sixteenths of the weight."""
    if form in STEPS:
        step = ((weight.double().amax(1) - weight.double().amin(1)) / STEPS[form])[:, None]
        worst = float(((weights - weight.double()).abs() / step).max())
        return {"what": "steps that a weight is off", "worst": worst, "right": worst < 1.1}
    # The largest weight is 448 scales. Below 2^-6 scales, FP8 numbers are subnormal, 2^-9 scales apart.
    least = weight.double().abs().amax(1, keepdim=True) / 448 * 2.0**-10
    worst = float(((weights - weight.double()).abs() / torch.maximum(weight.double().abs() / 16, least)).max())
    return {"what": "sixteenths of itself that a weight is off", "worst": worst, "right": worst < 1.1}


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Verdicts on products against float64, on dequantised against original weights, and on single rows in a batch."""
    for count, inputs, outputs in SMALL if small else JUDGED:
        weight = normal(outputs, inputs, device=device)
        rows, bias = normal(count, inputs, device=device), normal(outputs, device=device, dtype=torch.float32)
        for form, make in makers(device, inputs).items():
            layer, plain = make(weight, bias), make(weight, None)
            case, weights = f"{form}, {count} rows, {inputs} to {outputs}", meaning(plain)
            given = taken(layer, rows)
            exact = given.double() @ weights.T + bias.double()
            usual = functional.linear(given.to(rows.dtype), weights.to(rows.dtype), bias.to(rows.dtype))
            found, again = layer(rows), layer(rows)
            alone = layer(rows[:1])
            same = torch.equal(found, again) and torch.equal(alone[0], found[0])
            yield judged(case, "product", (found, usual, exact), same=same)
            yield {"case": case, **off(form, weights, weight)}
        if has_e4m3(torch.device(device)):
            yield from roundings(rows)


def roundings(rows: Tensor) -> Iterator[dict[str, Any]]:
    """Verdicts on whether rows are rounded to bitwise the same codes and scales as in plain torch."""
    for group in (None, GROUP):
        groups = -(-rows.shape[1] // group) if group else 1
        into = Rounded(torch.empty_like(rows, dtype=E4M3), rows.new_empty(len(rows), groups, dtype=torch.float32))
        round_launch(rows, into, group).run(rows.device)
        plain = rounded(rows, group)
        same = torch.equal(into.codes.view(torch.uint8), plain.codes.view(torch.uint8))
        right = same and torch.equal(into.scales, plain.scales)
        yield {"case": f"{list(rows.shape)}, scales of {group or 'rows'}", "what": "rows in FP8", "right": right}


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times of products, torch's bfloat16 times divided by them, and the fraction of the copy bandwidth."""
    copied = copied_per_second(device)
    for inputs, outputs in ((256, 70),) if small else LAYERS:
        weight = normal(outputs, inputs, device=device)
        layers = {form: make(weight, None) for form, make in makers(device, inputs).items()}
        for count in (1, 3) if small else COUNTS:
            rows = normal(count, inputs, device=device)
            theirs = seconds(lambda rows=rows, weight=weight: functional.linear(rows, weight), device)
            for form, layer in layers.items():
                ours = seconds(lambda layer=layer, rows=rows: layer(rows), device)
                held = sum(buffer.nbytes for buffer in layer.buffers())
                yield {
                    "case": f"{form}, {count} rows, {inputs} to {outputs}",
                    "beside": "torch in bfloat16",
                    "ms": 1e3 * ours,
                    "forward": theirs / ours,
                    "share_of_copy": held / ours / copied,
                    "tflops": 2 * count * inputs * outputs / ours / 1e12,
                }
