"""Compressed entries: tokens of a block, mixed per element by a learned softmax; and the indexer that selects them."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Rotary
from attn_core.masking import wide
from torch import Tensor, nn

from attn_sparse.blocks import mixed
from attn_sparse.compressed.options import CompressedConfig
from attn_sparse.dsa.indexer import index_scores, turn


def turn_last(rows: Tensor, positions: Tensor, rotary: Rotary | None, turned: int) -> Tensor:
    """Apply rotary positions [batch or 1, token] to the last `turned` elements of rows [batch, token, heads, size]."""
    if rotary is None or not turned:
        return rows
    rest, last = rows[..., :-turned], rows[..., -turned:]
    return torch.cat([rest, turn(last, positions, rotary, turned, interleaved=rotary.interleaved)], dim=-1)


class Compressor(nn.Module):
    """Entry w = RMSNorm(Σ_j softmax_j(W_g x_j + b_j) ⊙ W x_j), per element, over the tokens j of block w.

    With overlap a token has two projections: the first is mixed into the next block's entry, the second into its own.
    Learned: `value` and `gate` (`nn.Linear` without bias), `bias` [every, parts · size], and `norm`.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("bias",)

    def __init__(self, options: CompressedConfig, size: int) -> None:
        super().__init__()
        self.options, self.size, self.every = options, size, options.every or 1
        self.value = nn.Linear(options.hidden_size, options.parts * size, bias=False)
        self.gate = nn.Linear(options.hidden_size, options.parts * size, bias=False)
        self.bias = nn.Parameter(torch.zeros(self.every, options.parts * size))
        self.norm = nn.RMSNorm(size, eps=options.norm_eps)

    def forward(self, value: Tensor, gate: Tensor, real: Tensor, first: Tensor) -> Tensor:
        """Entries [batch, blocks, size] of consecutive blocks, with rotary positions, those of their first tokens.

        `value` and `gate` [batch, blocks · every, parts · size] are the projections of their tokens, with overlap after
        those of a further block; `real` [batch, blocks · every], bool, says which of these exist. `first` [batch] is
        the position of the first token of the first entry's own block.
        """
        blocks = real.shape[1] // self.every, self.every
        value, gate = (torch.unflatten(wide(part), 1, blocks) for part in (value, gate))
        gate, real = gate + wide(self.bias), torch.unflatten(real, 1, blocks)
        if self.options.overlap:
            value, gate = (
                torch.cat([part[:, :-1, :, : self.size], part[:, 1:, :, self.size :]], 2) for part in (value, gate)
            )
            real = torch.cat([real[:, :-1], real[:, 1:]], 2)
        normed = self.norm(mixed(value, gate, real).to(self.norm.weight.dtype))
        places = first[:, None] + torch.arange(normed.shape[1], device=normed.device) * self.every
        turned = self.options.turned(self.size)
        return turn_last(normed[:, :, None], places, self.options.rotary, turned)[:, :, 0]


class EntryIndexer(nn.Module):
    """I = Σ_j w_j ReLU(q_j · k / √size) / √heads over heads that share one compressed key per entry.

    Learned: `query` (from the queries' latent), `weight` and `compressor`. Inputs are detached: no gradient flows to
    them.
    """

    def __init__(self, options: CompressedConfig) -> None:
        super().__init__()
        self.options = options
        heads, size = options.index_heads, options.index_size
        self.query = nn.Linear(options.query_latent, heads * size, bias=False)
        self.weight = nn.Linear(options.hidden_size, heads, bias=False)
        self.compressor = Compressor(options, size)
        self.scale: float = (size * heads) ** -0.5

    def asked(self, rows: Tensor, latent: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [batch, query, heads, size] and their weights [batch, query, heads], at least float32."""
        query = torch.unflatten(wide(self.query(latent.detach())), -1, (self.options.index_heads, -1))
        turned = self.options.turned(self.options.index_size)
        query = turn_last(query, positions, self.options.rotary, turned)
        return query, wide(self.weight(rows.detach())) * self.scale

    def forward(self, asked: tuple[Tensor, Tensor], keys: Tensor) -> Tensor:
        """Index scores [batch, query, entry] of what `asked` returns and index keys [batch, entry, size]."""
        return index_scores(*asked, wide(keys))
