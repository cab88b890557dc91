"""Shows which kernel computes a linear layer with weights of a given format, and why each of the others refuses."""

from __future__ import annotations

from typing import Any

from attn_core import installed
from attn_core.computation import Computation
from attn_core.errors import InvalidValue
from attn_core.kernels.dispatch import explain
from attn_core.kernels.linear import FP8_FORMATS, MOST_BITS, STORED_FORMATS, WEIGHT_FORMATS, linear_problem

from attn_cli.facts import row_of

LINEAR = "linear"
"""The name of a linear layer in `attn explain`."""
FORMS = (*WEIGHT_FORMATS, *STORED_FORMATS)


def linear_verdicts(
    form: str | None, inputs: int, outputs: int | None, *, dtype: str, device: str
) -> list[dict[str, Any]]:
    """One row per kernel of the format `form`, for each `--quantization` with which a model has weights of the format.

    The layer has `inputs` inputs and `outputs` outputs (by default `inputs`), in a model that computes in `dtype`. If
    all kernels refuse, one more row shows what happens instead. Raises `InvalidValue` for an unknown format.
    """
    form = form or (dtype if dtype in WEIGHT_FORMATS else WEIGHT_FORMATS[0])
    if form not in FORMS:
        raise InvalidValue.of("--form", form, ", ".join(FORMS))
    rows = []
    for quantization in _quantizations_for(form, device):
        part = Computation(part=f"{LINEAR}, {quantization}")
        if quantization == "auto" and not _packs(form, dtype, device):
            rows.append(
                row_of(part, "torch", "runs", reasons=f"auto uses no kernel for {form} weights in {dtype} on {device}")
            )
            continue
        problem = linear_problem(
            form, (outputs or inputs, inputs), quantization=quantization, dtype=dtype, device=device
        )
        verdicts = explain([kernel for kernel in installed().linears if kernel.weights == form], problem)
        for place, verdict in enumerate(verdicts):
            word = "refuses" if not verdict.accepted else "would accept" if place else "runs"
            details = [*verdict.reasons, *([verdict.remark] if verdict.remark and word == "runs" else [])]
            rows.append(row_of(part, verdict.kernel.name, word, cost=verdict.cost, reasons="; ".join(details)))
        if not verdicts or not verdicts[0].accepted:
            rows.append(_instead(part, form, quantization, dtype))
    return rows


def _quantizations_for(form: str, device: str) -> tuple[str, ...]:
    """The values of `--quantization` with which a model on a device has weights of a format."""
    if form not in STORED_FORMATS:
        return (form,) if form in MOST_BITS else ("auto", form)
    here = {kernel.weights for kernel in installed().linears if device in kernel.devices}
    return ("auto", *(name for name, most in MOST_BITS.items() if STORED_FORMATS[form] <= most and name in here))


def _packs(form: str, dtype: str, device: str) -> bool:
    """Whether `auto` uses kernels for weights of a format: on a CPU in float32, except for FP8 weights, which are
    widened as they are read; on CUDA devices for the formats in `STORED_FORMATS`."""
    if device == "cpu":
        return dtype == "float32" and form not in FP8_FORMATS
    return device == "cuda" and form in STORED_FORMATS


def _instead(part: Computation, form: str, quantization: str, dtype: str) -> dict[str, Any]:
    """The row for what happens to the weights if no kernel accepts them."""
    if quantization == "auto":
        return row_of(
            part, "torch", "runs", reasons=f"weights are converted to {dtype} when they are loaded, with a warning"
        )
    if form in STORED_FORMATS:
        reasons = f"weights are dequantized when they are loaded, then packed again: see --form {quantization}"
        return row_of(part, f"those of {quantization}", "runs", reasons=reasons)
    return row_of(part, "none", "refuses", reasons=f"a model cannot be loaded with --quantization {quantization}")
