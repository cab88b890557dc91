"""Modules that predict later tokens than the next, so that a decoder learns more from each text."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from attn_models.decoder.attention import LayerAttention
from attn_models.decoder.block import Block
from attn_models.decoder.config import DecoderConfig
from attn_models.decoder.initial import initialise
from attn_models.decoder.norms import build_norm


class PredictionModule(nn.Module):
    """h'ᵢ = TRM(M [norm(Emb(tᵢ₊ₖ)); norm(hᵢ)]), from which tᵢ₊ₖ₊₁ is predicted (DeepSeek-V3, arXiv 2412.19437, 2.2).

    M's input begins with the embedding, as in the published weights; the paper writes it second. TRM is a block like
    the decoder's last, which borrows from nobody. `norm` stands before the unembedding, which is the decoder's own.
    """

    def __init__(self, config: DecoderConfig, last: LayerAttention) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm = build_norm(config), build_norm(config)
        self.join = nn.Linear(2 * config.width, config.width, bias=False)
        own = dataclasses.replace(last, config=dataclasses.replace(last.config, borrows=False))
        self.block = Block(config, own, config.experts_in(config.layers - 1))
        self.norm = build_norm(config)
        initialise(self.join)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Rows [batch, tokens, width] of a depth less and embeddings [batch, tokens, width] of the tokens that are k
        places later, to rows [batch, tokens, width]."""
        joined = self.join(torch.cat([self.token_norm(embedded), self.hidden_norm(hidden)], dim=-1))
        normed: Tensor = self.norm(self.block(joined))
        return normed
