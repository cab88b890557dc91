"""A residual sublayer, normalised before or after."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from attn_models.decoder.norms import build_norm
from attn_models.encoder_decoder.transformer_config import TransformerConfig

Inner = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """norm(x + F(x)) (Vaswani et al. 2017, section 3.1), or x + F(norm(x)) (arXiv 2002.04745)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre = config.norm_place == "pre"
        self.norm: nn.Module = build_norm(config.block)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, inner: Inner) -> Tensor:
        """[..., width] to [..., width]."""
        entering = self.entering(hidden)
        after: Tensor = hidden + self.dropout(inner(entering))
        normed: Tensor = after if self.pre else self.norm(after)
        return normed

    def entering(self, hidden: Tensor) -> Tensor:
        """What F is given."""
        normed: Tensor = self.norm(hidden) if self.pre else hidden
        return normed
