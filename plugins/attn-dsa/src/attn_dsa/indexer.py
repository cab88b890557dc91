"""The lightning indexer: which past tokens are worth reading."""

from __future__ import annotations

import torch
from attn_core.masking import wide
from torch import Tensor, nn

from attn_dsa.options import DsaConfig
from attn_dsa.turning import turn

EPSILON = 1e-6


class Indexer(nn.Module):
    """I = Σ_j w_j ReLU(q_j · k / √size) / √heads over a few small heads that share one normed key per token.

    Learned: `query`, `key` and `weight` (`nn.Linear` without bias) and `norm` (`nn.LayerNorm`). Inputs are taken as
    they are: no gradient passes to them.
    """

    def __init__(self, options: DsaConfig) -> None:
        super().__init__()
        self.options = options
        heads, size = options.index_heads, options.index_size
        self.query = nn.Linear(options.width, heads * size, bias=False)
        self.key = nn.Linear(options.width, size, bias=False)
        self.norm = nn.LayerNorm(size, eps=EPSILON)
        self.weight = nn.Linear(options.width, heads, bias=False)
        self.scale: float = (size * heads) ** -0.5

    def keys(self, rows: Tensor) -> Tensor:
        """Index keys [..., size] of rows [..., width], not yet turned to their positions."""
        keys: Tensor = self.norm(self.key(rows.detach()))
        return keys

    def queries(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Index queries [batch, query, heads, size] of rows [batch, query, width], at least float32."""
        query = wide(self.query(rows.detach())).reshape(*rows.shape[:-1], self.options.index_heads, -1)
        return self._turned(query, positions)

    def turned_keys(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Index keys [batch, key, size] turned to their positions [batch or 1, key], at least float32."""
        return self._turned(wide(keys)[:, :, None], positions)[:, :, 0]

    def weights(self, rows: Tensor) -> Tensor:
        """What each index head counts, [batch, query, heads], at least float32, the scale of products included."""
        return wide(self.weight(rows.detach())) * self.scale

    def _turned(self, rows: Tensor, positions: Tensor) -> Tensor:
        turned = self.options.turned
        if self.options.rotary is None or turned == 0:
            return rows
        return turn(rows, positions, self.options.rotary, turned)


def index_scores(query: Tensor, weights: Tensor, key: Tensor) -> Tensor:
    """I [batch, query, key].

    Of index queries [batch, query, heads, size], weights [batch, query, heads] and keys [batch, key, size].
    """
    products = torch.relu(query.flatten(1, 2) @ key.transpose(1, 2))
    per_head = products.reshape(*query.shape[:3], -1)
    scores: Tensor = (weights[:, :, None] @ per_head)[:, :, 0]
    return scores
