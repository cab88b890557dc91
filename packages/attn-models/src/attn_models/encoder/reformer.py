"""The Reformer as an encoder (Kitaev et al. 2020, arXiv 2001.04451)."""

from __future__ import annotations

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_models.decoder.layers import STANDARD, initialise
from attn_models.encoder.config import ReformerConfig
from attn_models.encoder.encoder import ReversibleBlock


class AxialPositions(nn.Module):
    """Places of a grid, by a vector for each row and one for each column."""

    def __init__(self, axes: tuple[int, int], widths: tuple[int, int]) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.empty(axes[0], 1, widths[0]))
        self.column = nn.Parameter(torch.empty(1, axes[1], widths[1]))
        for table in (self.row, self.column):
            nn.init.normal_(table, std=STANDARD)

    def forward(self, places: Tensor) -> Tensor:
        """Vectors [tokens, width] of places [tokens], int64."""
        columns = self.column.shape[1]
        return torch.cat([self.row[places // columns, 0], self.column[0, places % columns]], dim=-1)


class Reformer(nn.Module):
    """Two streams that begin alike, reversible blocks, and a norm of both side by side."""

    def __init__(self, config: ReformerConfig) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = config.max_seq_len
        self.size = 2 * config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions: nn.Module = nn.Embedding(config.max_seq_len, config.hidden_size)
        if config.axial_pos_shape is not None and config.axial_pos_embds_dim is not None:
            self.positions = AxialPositions(config.axial_pos_shape, config.axial_pos_embds_dim)
        self.blocks = nn.ModuleList(ReversibleBlock(config, layer) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(self.size, eps=config.norm_eps)
        for module in (self.embedding, self.positions):
            initialise(module)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """Rows [batch, tokens, 2 width] of token ids [batch, tokens], int64.

        `key_padding_mask` [batch, tokens], bool, is True where a token is real. Raises `InvalidValue` for more tokens
        than the context.
        """
        length = tokens.shape[1]
        if length > self.max_seq_len:
            raise InvalidValue.of("tokens", f"{length} tokens", f"at most the context of {self.max_seq_len} tokens")
        one = two = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            one, two = block(one, two, key_padding_mask)
        rows: Tensor = self.norm(torch.cat([one, two], dim=-1))
        return rows
