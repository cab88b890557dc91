"""FP8 (e4m3) attention: correctness against plain torch on this GPU, and speed compared with attn's 16-bit kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attn_core import Causal, Full, Window
from attn_core.masking import seen_pairs
from attn_kernels_triton import fp8 as by_codes
from attn_kernels_triton import fp8_reference as plain
from attn_kernels_triton.attention.attend import attend as attend_in_16
from cases import Case
from timing import seconds
from torch import Tensor

FACTOR, ROUNDINGS = 1.25, 3
"""The allowed error: this factor times that of the same roundings in plain torch, plus roundings of the output."""

RIGHT = [
    Case(name="full, 8 bits", mask=Full(), sizes=(128, 128), queries=512, keys=777),
    Case(name="causal, 8 bits", sizes=(64, 64), heads=(4, 4), batch=2),
    Case(name="window, 8 bits", mask=Window(left=200), sizes=(80, 128), dtype="float16"),
    Case(name="256, 8 bits", sizes=(256, 256)),
]
SMALL = [Case(name="causal, 8 bits", queries=33, keys=40, sizes=(32, 32), dtype="float16")]
LENGTHS = (4096, 8192, 16384)


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each case, the relative error, that of the same roundings in plain torch, and whether it is right."""
    for case in SMALL if small else RIGHT:
        operands = case.operands(device)
        found, again = (by_codes.attend(case.spec, operands) for _ in range(2))
        places = (torch.arange(count, device=device)[None] for count in (case.queries, case.keys))
        at, keys = next(places) + case.keys - case.queries, next(places)
        seen = seen_pairs(case.mask, at, keys, None)[0, 0]
        group = case.heads[0] // case.heads[1]
        error, usual, size = 0.0, 0.0, 0.0
        for number in range(case.batch):
            rows = [part[number].transpose(0, 1) for part in (operands.query, operands.key, operands.value)]
            rows = [rows[0], *(part.repeat_interleave(group, 0) for part in rows[1:])]
            exact = exactly(*rows, seen)
            expected = plain.attend(*rows, seen)
            error += float((found[number].transpose(0, 1).double() - exact).square().sum())
            usual += float((expected - exact).square().sum())
            size += float(exact.square().sum())
        error, usual = (error / size) ** 0.5, (usual / size) ** 0.5
        allowed, same = FACTOR * usual + ROUNDINGS * torch.finfo(found.dtype).eps, torch.equal(found, again)
        right = error <= allowed and same
        yield {"case": case.name, "what": "output", "error": error, "allowed": allowed, "same": same, "right": right}


def exactly(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Reference attention [head, row, size] in float64."""
    logits = query.double() @ key.double().transpose(1, 2) * query.shape[-1] ** -0.5
    return torch.softmax(logits.masked_fill(~seen, -torch.inf), -1) @ value.double()


def tables(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """The times in 8 bits, those of the attention kernel without quantisation, and the 16-bit times over the first."""
    for mask in (Full(), Causal()):
        for length in (32,) if small else LENGTHS:
            size, heads = (32, (2, 2)) if small else (128, (16, 16))
            shape: dict[str, Any] = {"queries": length, "keys": length, "sizes": (size, size), "heads": heads}
            dtype = "float16" if small else "bfloat16"
            case = Case(name=f"{mask.kind} {length}, 8 bits", mask=mask, dtype=dtype, **shape)
            yield {"case": case.name, "length": length, **timed(case, device)}


def timed(case: Case, device: str) -> dict[str, float]:
    """The times of one case."""
    operands = case.operands(device)
    plan, inputs = by_codes.checked_plan(case.spec, operands), by_codes.inputs_of(operands)
    coded, result = by_codes.empty_coded(inputs, rotated=True), by_codes.empty(plan, inputs)
    launches = by_codes.launches(plan, inputs, coded, result)
    for launch in launches:
        launch.run(operands.query.device)
    with torch.no_grad():
        usual = seconds(lambda: attend_in_16(case.spec, operands), device)
        whole = seconds(lambda: by_codes.attend(case.spec, operands), device)
        alone = seconds(lambda: launches[-1].run(operands.query.device), device)
    rate = 2 * sum(case.sizes) * case.mask.count(case.queries, case.keys) * case.heads[0] / whole / 1e12
    return {"ms": 1e3 * whole, "codes_alone_ms": 1e3 * alone, "tflops": rate, "beside_16_bits": usual / whole}
