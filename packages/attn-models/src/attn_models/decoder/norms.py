"""The normalisation that a config names."""

from __future__ import annotations

from torch import nn

from attn_models.decoder.config import DecoderConfig


def build_norm(config: DecoderConfig) -> nn.LayerNorm | nn.RMSNorm:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) over the width."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)
