"""The indexer of QSA, which scores the means of blocks, and the gate."""

from __future__ import annotations

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec
from attn_core.masking import positions, wide
from torch import Tensor, nn

from attn_sparse.dsa.indexer import Indexer
from attn_sparse.dsa.selection import Memory, SelectedTokens
from attn_sparse.qsa.options import QsaConfig
from attn_sparse.sparse_mla.pools import PooledMemory


class MeanIndexer(Indexer):
    """The indexer of `dsa`, whose heads have no weights, and whose keys are normalised after a mean over each block.

    Learned: `query`, `key` (`nn.Linear` without bias), `query_norm` and `norm` (`nn.RMSNorm`).
    """

    def __init__(self, options: QsaConfig) -> None:
        super().__init__(options)
        size, self.block = options.index_size, options.block
        self.query_norm, self.norm = (nn.RMSNorm(size, eps=options.norm_eps) for _ in range(2))
        del self.weight
        self.interleaved = options.rotary is not None and options.rotary.interleaved

    def keys(self, rows: Tensor) -> Tensor:
        """Index keys [..., size] of hidden states [..., hidden_size], of which means are taken later."""
        keys: Tensor = self.key(rows.detach())
        return keys

    def remembered(self, rows: Tensor, positions: Tensor) -> Tensor:  # noqa: ARG002 -- means have positions, keys do not
        """Index keys [..., size] of hidden states [..., hidden_size]."""
        return self.keys(rows)

    def queries(self, rows: Tensor, positions: Tensor) -> Tensor:
        """As of `Indexer`, normalised."""
        query = torch.unflatten(self.query(rows.detach()), -1, (self.options.index_heads, -1))
        return self._turned(wide(self.query_norm(query)), positions)

    def weights(self, rows: Tensor) -> Tensor:
        """1 / √size for each index head, [batch, query, heads]."""
        size = *rows.shape[:-1], self.options.index_heads
        return wide(rows).new_full(size, self.options.index_size**-0.5)

    def means(self, keys: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The index keys [batch, blocks, size] of the complete blocks of `keys` [batch, key, size], the positions of
        their last tokens [1, blocks], and whether they have a real one [batch, blocks]; `real` [batch, key], bool."""
        count = keys.shape[1] // self.block
        keys, real = (torch.unflatten(part[:, : count * self.block], 1, (count, self.block)) for part in (keys, real))
        held = real.sum(2)
        mean = (wide(keys) * real[..., None]).sum(2) / held.clamp(min=1)[..., None]
        first = torch.arange(count, device=keys.device)[None] * self.block
        normed = self.norm(mean.to(keys.dtype))
        return self.turned_keys(normed, first), first + self.block - 1, held > 0


class SelectedMeans(SelectedTokens):
    """Each query attends to the best blocks by the means of their index keys; outputs are multiplied by σ(x W_G).

    Learned besides the indexer: `gate` (`nn.Linear`, Glorot uniform).
    """

    indexer: MeanIndexer

    def __init__(self, spec: AttentionSpec, options: QsaConfig) -> None:
        super().__init__(spec, options)
        self.indexer = MeanIndexer(options)
        self.gate = nn.Linear(options.hidden_size, spec.heads.query * spec.heads.value_size, bias=options.bias)
        nn.init.xavier_uniform_(self.gate.weight)
        if options.bias:
            nn.init.zeros_(self.gate.bias)

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Gated outputs [batch, query, heads, value_size]."""
        out = super().forward(rows, operands, attend)
        return out * wide(self.gate(rows)).sigmoid().to(out.dtype).view_as(out)

    def _memory(self, operands: AttentionInputs) -> Memory:
        key, value, index = operands.key, operands.value, operands.fields["index"]
        given = operands.key_padding_mask
        real = index.new_ones(index.shape[:2], dtype=torch.bool) if given is None else given
        means, last, kept = self.indexer.means(index, real)
        places = positions(operands)[1]
        block = self.indexer.block
        return PooledMemory((wide(key),), wide(value), means, places, given, every=block, last=last, kept=kept)
