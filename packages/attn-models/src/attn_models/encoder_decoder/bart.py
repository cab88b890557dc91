"""BART and its relatives: mBART, PLBart, Pegasus, Marian, M2M-100 and Blenderbot."""

from __future__ import annotations

import math

import torch
from attn_core.rotary import sinusoidal
from torch import Tensor, nn

from attn_models.decoder.layers import build_norm, initialise
from attn_models.encoder_decoder.config import BartConfig
from attn_models.encoder_decoder.transformer import Transformer


class Bart(Transformer):
    """The Transformer with biases, and position embeddings and norms of embeddings as the config says (Lewis et al.
    2020, arXiv 1910.13461)."""

    config: BartConfig

    def __init__(self, config: BartConfig) -> None:
        super().__init__(config)
        first, width = config.first_position, config.hidden_size
        learned = config.positions == "learned"
        self.source_positions = nn.Embedding(first + config.max_encoder_len, width) if learned else None
        self.positions = nn.Embedding(first + config.max_seq_len, width) if learned else None
        self.source_norm: nn.Module = build_norm(config.block) if config.embedding_norm else nn.Identity()
        self.target_norm: nn.Module = build_norm(config.block) if config.embedding_norm else nn.Identity()
        self.output_bias = nn.Parameter(torch.zeros(1, config.vocab_size)) if config.output_bias else None
        for module in (self.source_positions, self.positions):
            if module is not None:
                initialise(module)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., width]."""
        scores = super().logits(hidden)
        return scores if self.output_bias is None else scores + self.output_bias[0]

    def greedy_tokens(self, hidden: Tensor) -> Tensor | None:
        """See `attn_core.models.GreedyHead`; supported by a packed unembedding without a bias."""
        return super().greedy_tokens(hidden) if self.output_bias is None else None

    def _embed_source(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._embedded(tokens, positions, self.source_positions, self.source_norm)

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._embedded(tokens, positions, self.positions, self.target_norm)

    def _embedded(self, tokens: Tensor, positions: Tensor, table: nn.Embedding | None, norm: nn.Module) -> Tensor:
        config = self.config
        scale = math.sqrt(config.hidden_size) if config.scale_embedding else 1.0
        places, hidden = positions + config.first_position, self.embedding(tokens) * scale
        if table is not None:
            waves: Tensor = table(places)
        elif config.positions == "sinusoidal":
            waves = sinusoidal(places, config.hidden_size)
            waves = torch.cat([waves[..., 0::2], waves[..., 1::2]], dim=-1).to(hidden)
        else:
            waves = tensor2tensor(places, config.hidden_size).to(hidden)
            waves = waves * torch.ne(tokens, -1 if config.padding_id is None else config.padding_id)[..., None]
        dropped: Tensor = self.dropout(norm(hidden + waves))
        return dropped


def tensor2tensor(positions: Tensor, width: int) -> Tensor:
    """sin(p / 10000^(i / (h - 1))) for i from 0 to h - 1, then the cosines of the same: float64 [..., width] for
    integers [...], where h is half of the width; the last element of an odd width is 0 (tensor2tensor's code)."""
    half = width // 2
    steps = torch.arange(half, dtype=torch.float64) / max(half - 1, 1)
    angles = positions.cpu().double()[..., None] * 10000.0**-steps
    waves = torch.cat([angles.sin(), angles.cos(), angles.new_zeros(*positions.shape, width % 2)], dim=-1)
    return waves.to(positions.device) if positions.device.type != "mps" else waves
