"""The declarations of linear layers with quantized weights (int8, int4 and block formats of files) on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.base import Anything, MultipleOf
from attn_core.kernels.linear import BLOCK_FORMATS, LinearKernel, LinearProblem

from attn_kernels_triton.machine import absence, interpreted

if TYPE_CHECKING:
    from torch import Tensor


class TritonLinear(LinearKernel):
    """Base class of linear kernels that dequantize weights to the dtype of the inputs in registers.

    Sums are taken in float32 in an order that does not depend on the number of rows; inputs in float32 are rounded to
    bfloat16. See `products.CodedLinear`.
    """

    exact: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu") if interpreted() else ("cuda",)
    bits: ClassVar[float]
    """The number of bits per weight, including its part of scales and minima."""

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """An estimate for 16 rows, relative to float32: the time to read the weights and to convert them."""
        return 0.1 + self.bits / 32


class TritonInt8(TritonLinear):
    """Weights as int8 with one step (scale) per output, which is applied to the sum."""

    name = "triton_int8"
    summary = "int8 weights with a step per output, inputs in 16 bits, on a GPU"
    weights: ClassVar[str] = "int8"
    bits = 8.0

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `products.int8_linear`."""
        from attn_kernels_triton.products import int8_linear

        return int8_linear(weight, bias)


class TritonInt4(TritonLinear):
    """Weights in GGUF's Q4_1 format: 4 bits, with a step (scale) and a minimum per 32 inputs."""

    name = "triton_int4"
    summary = "4-bit weights with a step and a minimum per 32 inputs (Q4_1), inputs in 16 bits, on a GPU"
    weights: ClassVar[str] = "int4"
    bits = 5.0

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `products.int4_linear`."""
        from attn_kernels_triton.products import int4_linear

        return int4_linear(weight, bias)


HELD_BITS = {"q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0, "q4_k": 6.0, "q6_k": 10.0, "int4_zeros": 4.75}
"""Bits per weight on the device, including scales and minima: more than in the file where steps become float32 (Q4_K,
Q6_K) or codes of six bits take a byte (Q6_K)."""
LARGE_BLOCKS = ("q4_k", "q6_k")
"""The formats whose blocks have 256 inputs; those of all others have 32."""


class TritonBlocks(TritonLinear):
    """Weights in a block format of files, without further rounding; see `stored_blocks`."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `stored_blocks.stored_linear`."""
        from attn_kernels_triton.stored_blocks import stored_linear

        return stored_linear(self.weights, weight, bias)


def in_blocks() -> list[LinearKernel]:
    """A kernel for each of `BLOCK_FORMATS`."""
    found: list[LinearKernel] = []
    for form in BLOCK_FORMATS:
        bits = HELD_BITS[form]
        attributes = {
            "name": f"triton_{form}",
            "summary": f"{form} weights without requantization, {bits:g} bits each, inputs in 16 bits, on a GPU",
            "weights": form,
            "bits": bits,
            "sizes": {"inputs": MultipleOf(256 if form in LARGE_BLOCKS else 32), "outputs": Anything()},
        }
        found.append(type(f"TritonBlocks{form.title()}", (TritonBlocks,), attributes)())
    return found
