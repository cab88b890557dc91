"""The normalisation that a config names."""

from __future__ import annotations

from torch import Tensor, nn

from attn_models.decoder.config import DecoderConfig


class WideRMSNorm(nn.RMSNorm):
    """RMSNorm whose gain may be of a wider type than its rows, as Gemma's is; then it is computed in that type."""

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] to [..., width], in the rows' type."""
        if rows.dtype == self.weight.dtype:
            return super().forward(rows)
        return super().forward(rows.to(self.weight.dtype)).to(rows.dtype)


def build_norm(config: DecoderConfig) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) over the width."""
    if config.norm == "rms":
        return WideRMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
