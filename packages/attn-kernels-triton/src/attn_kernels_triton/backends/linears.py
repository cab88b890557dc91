"""Linear layers whose weights are kept in few bits on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.linear import LinearKernel, LinearProblem

from attn_kernels_triton.machine import absence, interpreted

if TYPE_CHECKING:
    from torch import Tensor


class TritonLinear(LinearKernel):
    """Products of rows with weights that become numbers of the rows' type in registers; see `products.CodedLinear`.

    Sums are taken in float32 in one order, whatever rows are beside; rows in float32 are rounded to bfloat16.
    """

    exact: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cuda", "cpu") if interpreted() else ("cuda",)
    bits: ClassVar[float]
    """Of a weight, with what it shares with others."""

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def cost(self, problem: LinearProblem) -> float:  # noqa: ARG002 -- the same for every size
        """An estimate: 16 rows wait for weights, of which float32 has 32 bits, and for their conversion."""
        return 0.1 + self.bits / 32


class TritonInt8(TritonLinear):
    """Weights as int8 with a step for each output, which multiplies its sum."""

    name = "triton_int8"
    summary = "int8 weights with a step per output, inputs in 16 bits, on a GPU"
    weights: ClassVar[str] = "int8"
    bits = 8.0

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `products.int8_linear`."""
        from attn_kernels_triton.products import int8_linear

        return int8_linear(weight, bias)


class TritonInt4(TritonLinear):
    """Weights as GGUF's Q4_1 has them: 4 bits, a step and a least value for each 32 inputs."""

    name = "triton_int4"
    summary = "4-bit weights with a step and a least value per 32 inputs (Q4_1), inputs in 16 bits, on a GPU"
    weights: ClassVar[str] = "int4"
    bits = 5.0

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `products.int4_linear`."""
        from attn_kernels_triton.products import int4_linear

        return int4_linear(weight, bias)
