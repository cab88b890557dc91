"""Embeddings in the type they are stored in, rows handed out in the type that is computed with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StoredEmbedding(nn.Module):
    """The rows of a table [tokens, width] that stays as it is, in memory or in its file; given out as `dtype`."""

    table: Tensor

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("table", table.detach())
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows [..., width] of token ids [...]."""
        return nn.functional.embedding(tokens, self.table).to(self.dtype)
