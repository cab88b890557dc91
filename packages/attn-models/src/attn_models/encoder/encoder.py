"""An encoder of blocks that see both ways; the mechanism is any that is installed and can."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.initial import initialise
from attn_models.decoder.norms import build_norm
from attn_models.encoder.block import PostNormBlock
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.positions import POSITIONS, Position


class Encoder(nn.Module):
    """Token, position and segment embeddings, summed and normed, then blocks (Devlin et al. 2019, arXiv 1810.04805)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.size = config.width
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions: Position = POSITIONS[config.positions](config)
        self.segments = nn.Embedding(config.segments, config.width)
        self.norm = build_norm(config.block)
        self.blocks = nn.ModuleList(PostNormBlock(config, layer) for layer in range(config.layers))
        for module in (self.embedding, self.positions, self.segments):
            initialise(module)

    def forward(
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        segments: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Rows [batch, tokens, width] of token ids [batch, tokens], int64.

        `keep` [batch, tokens], bool, is True where a token is real; `segments` [batch, tokens] are 0 where None;
        `depths` [batch, tokens], in the tree of each sequence, are needed where positions are "depth". Raises
        `InvalidValue` for more tokens than the context, and without the depths that are needed.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.context} tokens")
        kinds = torch.zeros_like(tokens) if segments is None else segments
        places = self.positions.rows(tokens, keep, depths)
        hidden: Tensor = self.norm(self.embedding(tokens) + places + self.segments(kinds))
        for block in self.blocks:
            hidden = block(hidden, keep)
        return hidden
