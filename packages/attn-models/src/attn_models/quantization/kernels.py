"""Linear kernels that call torch: plain weights, weights prepacked by oneDNN, int8 and int4 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.base import Condition, MultipleOf
from attn_core.kernels.linear import LinearKernel, LinearProblem

from attn_models.quantization import INT4_GROUP

if TYPE_CHECKING:
    from torch import Tensor


EVERYWHERE = ("cpu", "cuda", "mps")
"""The types of devices that torch's own products support."""


class PlainFloat32(LinearKernel):
    """Weights in float32, multiplied by `torch.nn.functional.linear`."""

    name = "plain_float32"
    summary = "torch's own matrix product with float32 weights"
    weights: ClassVar[str] = "float32"
    float32: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = EVERYWHERE

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """1: other costs are relative to this kernel."""
        return 1.0

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.quantization.modules import PlainLinear

        return PlainLinear(weight.float(), bias)


class PlainBfloat16(LinearKernel):
    """Weights and inputs in bfloat16, multiplied by `torch.nn.functional.linear`."""

    name = "plain_bfloat16"
    summary = "torch's own matrix product of bfloat16 weights and inputs; slow on CPUs without bfloat16 instructions"
    weights: ClassVar[str] = "bfloat16"
    devices: ClassVar[tuple[str, ...]] = EVERYWHERE

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """The relative cost, measured on one AVX-512 core without bfloat16 instructions."""
        return 1.5

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        import torch

        from attn_models.quantization.modules import PlainLinear

        return PlainLinear(weight.to(torch.bfloat16), bias)


class PrepackedFloat32(LinearKernel):
    """Weights in float32 in oneDNN's own layout."""

    name = "onednn_float32"
    summary = "oneDNN's matrix product with float32 weights, prepacked in its own layout"
    weights: ClassVar[str] = "float32"
    float32: ClassVar[bool] = True

    def available(self) -> str | None:
        """The reason why oneDNN cannot be used here, or None if it can."""
        import torch

        return None if torch._C._has_mkldnn else "this torch is built without oneDNN"  # noqa: SLF001

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """The relative cost, measured on one AVX-512 core: slower than MKL at one row, 1.6 times faster at 16."""
        return 0.7

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.quantization.modules import OneDnnLinear

        return OneDnnLinear(weight.float(), bias)


class PrepackedBfloat16(LinearKernel):
    """Weights in bfloat16 in oneDNN's own layout, inputs rounded to bfloat16; for CPUs with bfloat16 instructions."""

    name = "onednn_bfloat16"
    summary = "oneDNN's matrix product of bfloat16 weights and inputs, on CPUs with bfloat16 instructions"
    weights: ClassVar[str] = "bfloat16"

    def available(self) -> str | None:
        """The reason why it would not be fast here, or None."""
        import torch

        if not torch._C._has_mkldnn:  # noqa: SLF001
            return "this torch is built without oneDNN"
        if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):  # noqa: SLF001
            return "the CPU has no bfloat16 instructions"
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # noqa: SLF001 -- oneDNN may be held to older ones
            return "oneDNN may not use the bfloat16 instructions of the CPU (ONEDNN_MAX_CPU_ISA)"
        return None

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """The relative cost, measured on one core: with AMX a quarter of float32's time; with AVX-512 instructions
        only, on a Zen 4, 1.26 times that of weights that are widened in C++ (0.46)."""
        import torch

        return 0.25 if torch.cpu._is_amx_tile_supported() else 0.58  # noqa: SLF001

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        import torch

        from attn_models.quantization.modules import OneDnnLinear

        return OneDnnLinear(weight.to(torch.bfloat16), bias)


class WeightOnlyInt8(LinearKernel):
    """Int8 weights with a scale for each output; inputs are rounded to bfloat16."""

    name = "torch_int8"
    summary = "torch's matrix product of bfloat16 inputs and int8 weights with a scale per output"
    weights: ClassVar[str] = "int8"

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """The relative cost, measured on one AVX-512 core."""
        return 0.72

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.quantization.modules import Int8Linear

        return Int8Linear(weight.float(), bias)


class WeightOnlyInt4(LinearKernel):
    """Int4 weights with a scale and a zero point for each 32 inputs of an output; inputs are rounded to bfloat16."""

    name = "torch_int4"
    summary = "torch's matrix product of bfloat16 inputs and int4 weights with a scale and a zero point per 32 inputs"
    weights: ClassVar[str] = "int4"

    # torch requires whole groups, and a multiple of 16 outputs.
    sizes: ClassVar[Mapping[str, Condition]] = {"inputs": MultipleOf(INT4_GROUP), "outputs": MultipleOf(16)}

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """The relative cost, measured on one AVX-512 core."""
        return 0.48

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.quantization.modules import Int4Linear

        return Int4Linear(weight.float(), bias)
