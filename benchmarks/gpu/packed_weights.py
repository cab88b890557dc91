"""Linear layers with weights of few bits: whether they are right on this GPU, and how fast beside torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attn_kernels_triton.products import TURN, CodedLinear, int4_linear, int8_linear
from recurrences import judged
from timing import copied_per_second, seconds
from torch import Tensor
from torch.nn import functional

MAKERS: dict[str, Callable[[Tensor, Tensor | None], CodedLinear]] = {"int8": int8_linear, "int4": int4_linear}
SMALL = ((48, 300, 70),)
JUDGED = ((1, 4096, 4096), (16, 4096, 6144), (64, 14336, 4096), (515, 4096, 1031), (3, 1000, 517))
"""Rows, inputs and outputs: of steps of decoding, of a prompt, and of no whole tile."""
COUNTS, LAYERS = (1, 16, 64, 512, 4096), ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""Rows, and layers of a model of eight billion parameters."""


def normal(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers, the same each time."""
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def meaning(layer: CodedLinear) -> Tensor:
    """The weights [outputs, inputs] in float64: what a product with rows of single ones gives, without rounding.

    Rows are float32, so that outputs are; ones lose nothing where they are rounded to bfloat16.
    """
    found = [layer(rows).T for rows in torch.eye(layer.inputs, device=layer.data.device).split(64 * TURN)]
    return torch.cat(found, dim=1).double()


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Products beside float64's, the weights beside those that were packed, and a row alone beside a crowd."""
    for count, inputs, outputs in SMALL if small else JUDGED:
        weight = normal(outputs, inputs, device=device)
        rows, bias = normal(count, inputs, device=device), normal(outputs, device=device, dtype=torch.float32)
        for form, make in MAKERS.items():
            layer, plain = make(weight, bias), make(weight, None)
            case, weights = f"{form}, {count} rows, {inputs} to {outputs}", meaning(plain)
            exact = rows.double() @ weights.T + bias.double()
            usual = functional.linear(rows, weights.bfloat16(), bias.bfloat16())
            found, again = layer(rows), layer(rows)
            alone = layer(rows[:1])
            same = torch.equal(found, again) and torch.equal(alone[0], found[0])
            yield judged(case, "product", (found, usual, exact), same=same)
            step = (weight.double().amax(1) - weight.double().amin(1)) / (15 if form == "int4" else 127)
            worst = float(((weights - weight.double()).abs() / step[:, None]).max())
            yield {"case": case, "what": "steps that a weight is off", "worst": worst, "right": worst < 1.1}


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """Times of products, those of torch's own in bfloat16 divided by them, and the share of the copying speed."""
    copied = copied_per_second(device)
    for inputs, outputs in ((96, 70),) if small else LAYERS:
        weight = normal(outputs, inputs, device=device)
        layers = {form: make(weight, None) for form, make in MAKERS.items()}
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
