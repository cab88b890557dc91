"""torch's products of bfloat16 rows and integer weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.linear import LinearKernel, LinearShape

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 32
"""Inputs that share a step and a least value as int4."""


class WeightOnlyInt8(LinearKernel):
    """A step for each output; inputs are rounded to bfloat16."""

    name = "torch_int8"
    summary = "torch's product of bfloat16 inputs and int8 weights with a step per output"
    weights: ClassVar[str] = "int8"

    def cost(self) -> float:
        """Measured on one AVX-512 core."""
        return 0.72

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.packing.modules import Int8Linear

        return Int8Linear(weight.float(), bias)


class WeightOnlyInt4(LinearKernel):
    """A step and a middle for each 32 inputs of an output; inputs are rounded to bfloat16."""

    name = "torch_int4"
    summary = "torch's product of bfloat16 inputs and int4 weights with a step and a middle per 32 inputs"
    weights: ClassVar[str] = "int4"

    def refuses(self, shape: LinearShape) -> str | None:
        """torch takes whole groups, and outputs by 16."""
        if shape.inputs % GROUP:
            return f"{shape.inputs} inputs are not a multiple of {GROUP}"
        return f"{shape.outputs} outputs are not a multiple of 16" if shape.outputs % 16 else None

    def cost(self) -> float:
        """Measured on one AVX-512 core."""
        return 0.48

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.packing.modules import Int4Linear

        return Int4Linear(weight.float(), bias)
