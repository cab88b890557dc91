"""torch's own product, for every chip: weights as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.linear import LinearKernel

if TYPE_CHECKING:
    from torch import Tensor


class PlainFloat32(LinearKernel):
    """Weights in float32, multiplied by `torch.nn.functional.linear`."""

    name = "plain_float32"
    summary = "torch's own product of float32 weights"
    weights: ClassVar[str] = "float32"
    float32: ClassVar[bool] = True

    def cost(self) -> float:
        """The unit."""
        return 1.0

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.packing.modules import PlainLinear

        return PlainLinear(weight.float(), bias)


class PlainBfloat16(LinearKernel):
    """Weights and inputs in bfloat16, multiplied by `torch.nn.functional.linear`."""

    name = "plain_bfloat16"
    summary = "torch's own product of bfloat16 weights and inputs; slow on chips without such instructions"
    weights: ClassVar[str] = "bfloat16"

    def cost(self) -> float:
        """Measured on one AVX-512 core without bfloat16 instructions."""
        return 1.5

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        import torch

        from attn_models.packing.modules import PlainLinear

        return PlainLinear(weight.to(torch.bfloat16), bias)
