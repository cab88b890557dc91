"""The normalisation that a config names."""

from __future__ import annotations

import torch
from attn_core.kernels.rowwise import NormKernel, row_kernel
from torch import Tensor, nn

from attn_models.decoder.config import DecoderConfig


class WideRMSNorm(nn.RMSNorm):
    """RMSNorm whose gain may be of a wider type than its rows, as Gemma's is; then it is computed in that type."""

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] to [..., width], in the rows' type."""
        kernel = self._kernel("plain", rows)
        if kernel is not None:
            return kernel.norm(rows, self.weight, self.eps or 0.0)
        if rows.dtype == self.weight.dtype:
            return super().forward(rows)
        return super().forward(rows.to(self.weight.dtype)).to(rows.dtype)

    def of_sum(self, rows: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """`rows` + `added`, [..., width] both, and that normed: in one pass where a kernel can."""
        kernel = self._kernel("added", rows, added) if rows.dtype == added.dtype else None
        if kernel is not None:
            return kernel.norm_sum(rows, added, self.weight, self.eps or 0.0)
        total = rows + added
        return total, self(total)

    def _kernel(self, form: str, *rows: Tensor) -> NormKernel | None:
        if torch.compiler.is_compiling() or self.eps is None:
            return None
        return row_kernel(NormKernel, form, *rows, self.weight)


def normed_sum(norm: nn.Module, rows: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """`rows` + `added`, and that through a norm."""
    if isinstance(norm, WideRMSNorm):
        return norm.of_sum(rows, added)
    total = rows + added
    return total, norm(total)


def build_norm(config: DecoderConfig) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) over the width."""
    if config.norm == "rms":
        return WideRMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
