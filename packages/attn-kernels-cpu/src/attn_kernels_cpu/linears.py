"""The declarations of the linear kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import KernelRefused
from attn_core.kernels.base import Anything, Condition, MultipleOf
from attn_core.kernels.linear import BLOCK_FORMATS, LinearKernel, LinearProblem

from attn_kernels_cpu import chip
from attn_kernels_cpu.compiling import why_not
from attn_kernels_cpu.forms import FORMS

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32


class CpuLinear(LinearKernel):
    """Base class of the linear kernels, each for one weight format; see `PackedLinear`."""

    exact: ClassVar[bool] = True
    layout: ClassVar[str]
    """The name of the memory layout in `FORMS`."""
    price: ClassVar[float]
    """The cost, measured on one AVX-512 core without bfloat16 instructions."""

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: LinearProblem) -> list[str]:  # noqa: ARG002 -- any shape
        """Why the kernels could not be compiled, which is tried here."""
        from attn_kernels_cpu.library import trouble

        reason = trouble()
        return [] if reason is None else [reason]

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """See `LinearKernel.cost`."""
        return self.price

    def remark(self, problem: LinearProblem) -> str | None:  # noqa: ARG002 -- the same for every one
        """The instruction set that was chosen for this machine."""
        from attn_kernels_cpu.library import loaded

        return f"instruction set {loaded().isa.name} (ATTN_CPU_ISA selects another)"

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """A `PackedLinear`; compiles the kernels the first time."""
        from attn_kernels_cpu.packed import PackedLinear

        return PackedLinear(self.layout, weight, bias)

    def join(self, packed: Sequence[Any]) -> Any | None:
        """A `PackedLinear` that joins these layers; None if another kernel made one of them."""
        from attn_kernels_cpu.packed import PackedLinear

        return PackedLinear.joined(packed) if all(type(part) is PackedLinear for part in packed) else None


class CpuFloat32(CpuLinear):
    """Weights in float32."""

    name = "cpu_float32"
    summary = "float32 weights, multiplied in float32 in C++"
    weights: ClassVar[str] = "float32"
    layout: ClassVar[str] = "float32"
    float32: ClassVar[bool] = True
    price = 0.53


class CpuBfloat16(CpuLinear):
    """Weights in bfloat16, everything else in float32."""

    name = "cpu_bfloat16"
    summary = "bfloat16 weights, multiplied in float32 in C++"
    weights: ClassVar[str] = "bfloat16"
    layout: ClassVar[str] = "bfloat16"
    float32: ClassVar[bool] = True
    price = 0.46


class AmxLinear(CpuLinear):
    """Base class of the linear kernels that multiply in the tile registers of AMX."""

    def available(self) -> str | None:
        """Why the kernels or AMX cannot be used here, or None."""
        return super().available() or chip.without(chip.TILES, chip.flags())

    def further_refusals(self, problem: LinearProblem) -> list[str]:
        """Why the kernels could not be compiled, or why the system does not permit the use of the tile registers."""
        from attn_kernels_cpu.library import without_tiles

        reasons = super().further_refusals(problem)
        reason = None if reasons else without_tiles()
        return reasons if reason is None else [reason]

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """A `PackedLinear`; raises `KernelRefused` if AMX cannot be used, which would crash the process."""
        from attn_kernels_cpu.library import without_tiles

        if reason := without_tiles():
            raise KernelRefused(f"kernel {self.name!r} cannot run here: {reason}", kernel=self.name)
        return super().pack(weight, bias)


class AmxBfloat16(AmxLinear):
    """Each input is split into three bfloat16 numbers that add up to it, which rounds no more than float32.

    Parts of an input below 1.2e-38 are treated as zero.
    """

    name = "amx_bfloat16"
    summary = "bfloat16 weights and float32 inputs, both multiplied without rounding, on CPUs with AMX"
    weights: ClassVar[str] = "bfloat16"
    layout: ClassVar[str] = "bfloat16_exact"
    float32: ClassVar[bool] = True
    price = 0.14


class AmxRoundedBfloat16(AmxLinear):
    """Weights in bfloat16, with inputs rounded to bfloat16."""

    name = "amx_bfloat16_rounded"
    summary = "bfloat16 weights, inputs rounded to bfloat16, on CPUs with AMX"
    weights: ClassVar[str] = "bfloat16"
    layout: ClassVar[str] = "bfloat16_rounded"
    price = 0.08


class AmxInt8(AmxLinear):
    """Weights as int8 with a step per output; inputs as integer multiples of 1/32512 of their row's largest."""

    name = "amx_int8"
    summary = "int8 weights with a step per output, inputs in 16 bits with a step per row, on CPUs with AMX"
    weights: ClassVar[str] = "int8"
    layout: ClassVar[str] = "int8_tiles"
    price = 0.06


class QuantizedCpuLinear(CpuLinear):
    """Base class of the linear kernels that quantize inputs to int8 with a step per 32 inputs."""

    # Inputs are quantized in groups of 32.
    sizes: ClassVar[Mapping[str, Condition]] = {"inputs": MultipleOf(GROUP), "outputs": Anything()}


class CpuInt8(QuantizedCpuLinear):
    """Weights as int8 with a step per output."""

    name = "cpu_int8"
    summary = "int8 weights with a step per output, inputs as int8 with a step per 32, in C++"
    weights: ClassVar[str] = "int8"
    layout: ClassVar[str] = "int8"
    price = 0.19


class CpuInt4(QuantizedCpuLinear):
    """Weights in GGUF's Q4_1 format: 4 bits, with a step and a minimum per 32 inputs."""

    name = "cpu_int4"
    summary = "4-bit weights with a step and a minimum per 32 inputs (Q4_1), inputs as int8, in C++"
    weights: ClassVar[str] = "int4"
    layout: ClassVar[str] = "int4"
    price = 0.22


class CpuBlocks(CpuLinear):
    """Base class of the kernels for weights in blocks."""

    def pack_rows(self, weights: Sequence[Tensor], bias: Tensor | None) -> Any:
        """See `LinearKernel.pack_rows`; copies none of the matrices before they are packed."""
        from attn_kernels_cpu.packed import PackedLinear

        return PackedLinear(self.layout, weights, bias)


def in_blocks() -> list[LinearKernel]:
    """Two kernels for each of `BLOCK_FORMATS`: one that rounds inputs to int16, one that rounds them to int8."""
    found: list[LinearKernel] = []
    for form, bits in BLOCK_FORMATS.items():
        base = {"weights": form, "sizes": {"inputs": MultipleOf(FORMS[form].group), "outputs": Anything()}}
        int16 = {
            "name": f"cpu_{form}_int16",
            "summary": f"{form} weights without requantization, {bits} bits each, inputs as int16, in C++",
            "layout": f"{form}_int16",
            "float32": True,
            "price": 0.25,
        }
        rounded = {
            "name": f"cpu_{form}",
            "summary": f"{form} weights without requantization, {bits} bits each, inputs as int8, in C++",
            "layout": form,
            "price": 0.22,
        }
        found += [
            type(f"CpuBlocks{form.title()}", (CpuBlocks,), base | attributes)() for attributes in (int16, rounded)
        ]
    return found


class AmxInt4(QuantizedCpuLinear, AmxLinear):
    """The same weights and sums as `CpuInt4`, bit for bit, with four and more rows in AMX tiles.

    Attention between such layers is rounded to bfloat16.
    """

    name = "amx_int4"
    summary = "4-bit weights with a step and a minimum per 32 inputs (Q4_1), inputs as int8, on CPUs with AMX"
    weights: ClassVar[str] = "int4"
    layout: ClassVar[str] = "int4_tiles"
    price = 0.07
