"""oneDNN's product of weights that are laid out for it beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.linear import LinearKernel

if TYPE_CHECKING:
    from torch import Tensor


class PrepackedFloat32(LinearKernel):
    """Weights in float32 in oneDNN's own layout."""

    name = "onednn_float32"
    summary = "oneDNN's product of float32 weights in its own layout"
    weights: ClassVar[str] = "float32"
    float32: ClassVar[bool] = True

    def available(self) -> str | None:
        """Why oneDNN cannot be used here, or None."""
        import torch

        return None if torch._C._has_mkldnn else "this torch is built without oneDNN"  # noqa: SLF001

    def cost(self) -> float:
        """Measured on one AVX-512 core: slower than MKL at one row, 1.6 times faster at 16."""
        return 0.7

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        from attn_models.packing.modules import OneDnnLinear

        return OneDnnLinear(weight.float(), bias)


class PrepackedBfloat16(LinearKernel):
    """Weights in bfloat16 in oneDNN's own layout, inputs rounded to bfloat16; for chips that multiply these."""

    name = "onednn_bfloat16"
    summary = "oneDNN's product of bfloat16 weights and inputs, on chips with instructions for it"
    weights: ClassVar[str] = "bfloat16"

    def available(self) -> str | None:
        """Why it would not be fast here, or None."""
        import torch

        if not torch._C._has_mkldnn:  # noqa: SLF001
            return "this torch is built without oneDNN"
        if not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):  # noqa: SLF001
            return "the chip has no instructions for bfloat16"
        return None

    def cost(self) -> float:
        """Measured on one core with AMX: a quarter of float32's time."""
        return 0.25

    def pack(self, weight: Tensor, bias: Tensor | None) -> Any:
        """See `LinearKernel.pack`."""
        import torch

        from attn_models.packing.modules import OneDnnLinear

        return OneDnnLinear(weight.to(torch.bfloat16), bias)
