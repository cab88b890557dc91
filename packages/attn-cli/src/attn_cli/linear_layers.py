"""Which kernel multiplies a linear layer whose weights are kept in a format, and why each of the others does not."""

from __future__ import annotations

from typing import Any

from attn_core import installed
from attn_core.computation import Computation
from attn_core.errors import InvalidValue
from attn_core.kernels.dispatch import explain
from attn_core.kernels.linear import FP8_FORMATS, MOST_BITS, STORED_FORMATS, WEIGHT_FORMATS, linear_problem

from attn_cli.facts import row_of

LINEAR = "linear"
"""What `attn explain` calls a linear layer."""
FORMS = (*WEIGHT_FORMATS, *STORED_FORMATS)


def linear_verdicts(
    form: str | None, inputs: int, outputs: int | None, *, dtype: str, device: str
) -> list[dict[str, Any]]:
    """A row per kernel of a format, for each `--quantization` with which a model meets it, of a layer of so many inputs
    and outputs (by default as many) in a model that computes in `dtype`; and one for what happens where all refuse.

    Raises `InvalidValue` for a format that does not exist.
    """
    form = form or (dtype if dtype in WEIGHT_FORMATS else WEIGHT_FORMATS[0])
    if form not in FORMS:
        raise InvalidValue.of("--form", form, ", ".join(FORMS))
    rows = []
    for quantization in _met_with(form, device):
        part = Computation(part=f"{LINEAR}, {quantization}")
        if quantization == "auto" and not _packs(form, dtype, device):
            rows.append(row_of(part, "torch", "runs", reasons=f"auto packs no {form} weights in {dtype} on {device}"))
            continue
        problem = linear_problem(
            form, (outputs or inputs, inputs), quantization=quantization, dtype=dtype, device=device
        )
        verdicts = explain([kernel for kernel in installed().linears if kernel.weights == form], problem)
        for place, verdict in enumerate(verdicts):
            word = "refuses" if not verdict.accepted else "would accept" if place else "runs"
            told = [*verdict.reasons, *([verdict.remark] if verdict.remark and word == "runs" else [])]
            rows.append(row_of(part, verdict.kernel.name, word, cost=verdict.cost, reasons="; ".join(told)))
        if not verdicts or not verdicts[0].accepted:
            rows.append(_instead(part, form, quantization, dtype))
    return rows


def _met_with(form: str, device: str) -> tuple[str, ...]:
    """The values of `--quantization` with which a model on a device has weights in a format."""
    if form not in STORED_FORMATS:
        return (form,) if form in MOST_BITS else ("auto", form)
    here = {kernel.weights for kernel in installed().linears if device in kernel.devices}
    return ("auto", *(name for name, most in MOST_BITS.items() if STORED_FORMATS[form] <= most and name in here))


def _packs(form: str, dtype: str, device: str) -> bool:
    """Whether `auto` asks kernels for weights in a format: in float32 on a CPU, where those in FP8 are widened as they
    are read, and on CUDA devices for blocks."""
    if device == "cpu":
        return dtype == "float32" and form not in FP8_FORMATS
    return device == "cuda" and form in STORED_FORMATS


def _instead(part: Computation, form: str, quantization: str, dtype: str) -> dict[str, Any]:
    """The row for what becomes of weights where no kernel takes them."""
    if quantization == "auto":
        return row_of(
            part, "torch", "runs", reasons=f"weights are widened to {dtype} as they are loaded, which is said"
        )
    if form in STORED_FORMATS:
        reasons = f"weights are widened as they are loaded and packed anew: see --form {quantization}"
        return row_of(part, f"those of {quantization}", "runs", reasons=reasons)
    return row_of(part, "none", "refuses", reasons=f"a model is not loaded with --quantization {quantization}")
