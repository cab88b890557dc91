"""The declarations of linear layers with weights, and optionally inputs, in FP8 (e4m3) on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels import devices
from attn_core.kernels.base import Condition, MultipleOf
from attn_core.kernels.linear import FP8_FORMATS, LinearKernel, LinearProblem

from attn_kernels_triton.backends.conditions import FP8_CAPABILITY
from attn_kernels_triton.backends.linears import TritonLinear
from attn_kernels_triton.machine import interpreted

if TYPE_CHECKING:
    from torch import Tensor

HELD_BITS = {"fp8": 8.0, "fp8_channel": 8.0, "fp8_block": 8.25}
"""Bits per weight on the device, including scales: each output has its own scale per 128 inputs, where a file stores
one for a block of 128 outputs."""
WEIGHT_SUMMARIES = {
    "fp8": "FP8 weights (e4m3) with a scale per output",
    "fp8_channel": "FP8 weights of a checkpoint, with a scale per output",
    "fp8_block": "FP8 weights of a checkpoint, with a scale per 128 inputs of an output",
}


class TritonFp8W8A16(TritonLinear):
    """Weight-only FP8: weights are widened to 16 bits in registers, on any GPU, as in vLLM's Marlin kernel.

    Stored codes are multiplied exactly, and scales are applied to the sums, in float32.
    """

    weight_only: ClassVar[bool] = True

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `products_fp8.fp8_weights`."""
        from attn_kernels_triton.products import CodedLinear
        from attn_kernels_triton.products_fp8 import fp8_weights

        return CodedLinear(fp8_weights(self.weights, weight, bias), self.weights)

    def remark(self, problem: LinearProblem) -> str | None:
        """A note, for weight-only layers, that the input quantization of the checkpoint is not applied."""
        if not problem.weight_only:
            return None
        return "inputs keep 16 bits, whatever the checkpoint says of them; --quantization fp8 rounds them to FP8"


class TritonFp8W8A8(TritonLinear):
    """Weights and inputs in FP8, which tensor cores multiply at twice the rate of 16 bits.

    A separate kernel quantizes the inputs with one scale per row, or per 128 inputs of a row where weights have block
    scales: the dynamic per-token scheme of vLLM.
    """

    def available(self) -> str | None:
        """Why it cannot run on this machine, judged by the first GPU, or None if it can."""
        return super().available() or without_e4m3()

    def cost(self, problem: LinearProblem) -> float:
        """An estimate: the cost of weight-only layers without the conversion of the weights."""
        return super().cost(problem) - 0.05

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `products_fp8.fp8_weights`."""
        from attn_kernels_triton.products_fp8 import RoundedRowsLinear, fp8_weights

        return RoundedRowsLinear(fp8_weights(self.weights, weight, bias), self.weights)

    def remark(self, problem: LinearProblem) -> str | None:
        """How inputs are quantized, and that a static input scale of the checkpoint is not used."""
        group = " and 128 inputs" if problem.weights == "fp8_block" else ""
        ignored = (
            "; a static scale (input_scale) of the checkpoint is ignored" if problem.weights in FP8_FORMATS else ""
        )
        return f"inputs are quantized to FP8 with a dynamic scale per row{group}{ignored}"


def without_e4m3() -> str | None:
    """Why the first GPU of this machine cannot multiply e4m3, or None if it can."""
    if interpreted():
        return None
    gpu = devices.nvidia_gpu()
    if gpu is None:
        return "an NVIDIA GPU is required: the FP8 format of AMD's MI300 is e4m3fnuz, another encoding than e4m3fn"
    if gpu.capability < FP8_CAPABILITY:
        present, needed = (".".join(map(str, part)) for part in (gpu.capability, FP8_CAPABILITY))
        return f"{gpu.name} cannot multiply FP8: its compute capability is {present}, required is {needed} or more"
    return None


def in_fp8() -> list[LinearKernel]:
    """Two kernels for each format: one with inputs in FP8 (W8A8) and one with inputs in 16 bits (W8A16)."""
    kinds = {"w8a8": (TritonFp8W8A8, "inputs in FP8"), "w8a16": (TritonFp8W8A16, "inputs in 16 bits")}
    found: list[LinearKernel] = []
    for form, bits in HELD_BITS.items():
        sizes: dict[str, Condition] = {"inputs": MultipleOf(128)} if form == "fp8_block" else {}
        for suffix, (kind, inputs) in kinds.items():
            attributes = {
                "name": f"triton_{form}_{suffix}",
                "summary": f"{WEIGHT_SUMMARIES[form]}, {inputs}, on a GPU",
                "weights": form,
                "bits": bits,
                "sizes": {**TritonLinear.sizes, **sizes},
            }
            found.append(type(f"{kind.__name__}{form.title()}", (kind,), attributes)())
    return found
