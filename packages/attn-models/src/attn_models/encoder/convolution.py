"""The convolution beside the first layer of DeBERTa-v2."""

from __future__ import annotations

from torch import Tensor, nn

from attn_models.decoder.layers import ACTIVATIONS
from attn_models.encoder.config import EncoderConfig


class Convolution(nn.Module):
    """norm(x + f(c)) for the rows x of the first layer and a convolution c of the embeddings, in which padding is zero
    (He et al. 2020, arXiv 2006.03654, section 5.3)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(size, size, kernel, padding=kernel // 2, groups=config.conv_groups)
        self.activation = {"tanh": nn.Tanh, **ACTIVATIONS}[config.conv_act]()
        self.norm = nn.LayerNorm(size, eps=config.norm_eps)

    def forward(self, rows: Tensor, embedded: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """Rows [batch, tokens, width] of those of the first layer and the embeddings, of the same shape."""
        if key_padding_mask is not None:
            embedded = embedded * key_padding_mask[..., None]
        found: Tensor = self.norm(rows + self.activation(self.conv(embedded.transpose(1, 2)).transpose(1, 2)))
        return found
