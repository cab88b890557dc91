"""The indexer that scores blocks of keys, and attention to the blocks that it selects."""

from __future__ import annotations

import torch
from attn_core import Attend, AttentionInputs, AttentionSpec, Fields, InnerAttention, installed
from attn_core.kernels.base import batch_invariant
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksDispatcher
from attn_core.masking import positions, seen_pairs, shares, wide
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_sparse.dsa.indexer import turn
from attn_sparse.indexed_blocks.options import IndexedBlocksConfig

NEVER = float("-inf")


def picked(rows: Tensor, index: Tensor) -> Tensor:
    """The rows [batch, groups, chosen, size] at `index` [batch, groups, chosen] of rows [batch, key, groups, size]."""
    batch, keys, groups, size = rows.shape
    sequence, group = (torch.arange(count, device=rows.device) for count in (batch, groups))
    # Caches differ in which of both axes comes first, and whole rows are copied faster than their elements.
    if rows.is_contiguous():
        flat, place = rows.view(-1, size), (index + sequence[:, None, None] * keys) * groups + group[:, None]
    else:
        flat = rows.transpose(1, 2).reshape(-1, size)
        place = (sequence[:, None, None] * groups + group[:, None]) * keys + index
    return flat.index_select(0, place.flatten()).view(*index.shape, size)


class IndexedBlocksAttention(InnerAttention, nn.Module):
    """Each group of query heads attends to the newest blocks and to those whose best key the group's index head
    scores highest.

    Learned: `query` (an index head for each group), `key` (one for all), `nn.Linear` without bias, and their norms
    `query_norm` and `key_norm`. No gradient reaches them: the selection has none.
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, options: IndexedBlocksConfig) -> None:
        super().__init__()
        self.spec, self.options = spec, options
        self.plan = SelectedBlocksDispatcher(installed().kernels, spec.heads)
        self.groups, size = spec.heads.key_value, options.index_size
        self.query = nn.Linear(options.hidden_size, self.groups * size, bias=False)
        self.key = nn.Linear(options.hidden_size, size, bias=False)
        self.query_norm = nn.RMSNorm(size, eps=options.norm_eps or 1e-6)
        self.key_norm = nn.RMSNorm(size, eps=options.norm_eps or 1e-6)

    def remember(self, rows: Tensor) -> Fields:
        """The field "index": index keys [..., index_size] of hidden states [..., hidden_size]."""
        return {"index": self.key_norm(self.key(rows.detach()))}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        if rows.shape[1] == 0:
            return attend(operands)
        chosen, places = self._chosen(rows, operands)
        query = torch.unflatten(wide(operands.query), 2, (self.groups, -1)).transpose(1, 2)
        if rows.shape[1] == 1 and not batch_invariant():
            return self._gathered(query * self.spec.heads.key_size**-0.5, chosen, places, operands)
        key, value, real = map(self._blocks, (operands.key, operands.value, self._real(operands)))
        key, value = (wide(part).permute(0, 3, 1, 2, 4).contiguous() for part in (key, value))
        selected = SelectedBlocks(query * self.spec.heads.key_size**-0.5, chosen, places)
        out = self.plan.run(selected, KeyBlocks(key, value, real), operands)
        return out.permute(0, 2, 1, 3, 4).flatten(2, 3).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Attention weights [batch, heads, query, key], zero outside the chosen blocks."""
        chosen, places = self._chosen(rows, operands)
        keys = operands.key.shape[1]
        blocks = -(-keys // self.options.block)
        # The index -1, which means no block, is replaced by one after the last block.
        read = torch.zeros(*chosen.shape[:-1], blocks + 1, dtype=torch.bool, device=chosen.device)
        read = read.scatter(-1, chosen.masked_fill(chosen < 0, blocks), value=True)[..., :blocks]
        read = read.repeat_interleave(self.options.block, dim=-1)[..., :keys]
        query = torch.unflatten(wide(operands.query), 2, (self.groups, -1)).permute(0, 2, 3, 1, 4)
        scores = query @ wide(operands.key).permute(0, 2, 3, 1)[:, :, None] * self.spec.heads.key_size**-0.5
        seen = seen_pairs(self.spec.mask, places, positions(operands)[1], operands.key_padding_mask)
        return shares(scores, (read & seen)[:, :, None]).flatten(1, 2)

    def _gathered(self, query: Tensor, chosen: Tensor, places: Tensor, operands: AttentionInputs) -> Tensor:
        """Outputs [batch, 1, heads, value_size] of one query per sequence [batch, groups, 1, shared, size], which only
        reads the keys and values of its blocks."""
        keys, block = operands.key.shape[1], self.options.block
        within = torch.arange(block, device=chosen.device)
        index = torch.where(chosen < 0, keys, chosen * block)[:, :, 0, :, None] + within
        index = index.flatten(2)
        seen = seen_pairs(self.spec.mask, places, positions(operands)[1], operands.key_padding_mask)[:, 0]
        known, index = index < keys, index.clamp(max=keys - 1)
        known = known & seen.expand(*index.shape[:2], -1).gather(2, index)
        key, value = (wide(picked(part, index)) for part in (operands.key, operands.value))
        weights = shares(query[:, :, 0] @ key.transpose(2, 3), known[:, :, None])
        return (weights @ value).flatten(1, 2)[:, None].to(operands.value.dtype)

    def _chosen(self, rows: Tensor, operands: AttentionInputs) -> tuple[Tensor, Tensor]:
        """The blocks [batch, groups, query, chosen], int64, the query's own first, -1 for none, and the positions of
        the queries [batch, query]."""
        places, keys = positions(operands)
        places = places.expand(rows.shape[0], -1)
        with torch.no_grad():
            query = self.query_norm(torch.unflatten(self.query(rows), -1, (self.groups, -1)))
            query, key = wide(query), wide(operands.fields["index"])
            query, key = self._turned(query, places), self._turned(key[:, :, None], keys)[:, :, 0]
            scores = torch.unflatten(query.transpose(1, 2).flatten(1, 2) @ key.transpose(1, 2), 1, (self.groups, -1))
            scores = scores.masked_fill(~seen_pairs(self.spec.mask, places, keys, operands.key_padding_mask), NEVER)
            missing = -scores.shape[-1] % self.options.block
            best = torch.unflatten(pad(scores, (0, missing), value=NEVER), -1, (-1, self.options.block)).amax(-1)
            return self._best(best, places // self.options.block), places

    def _turned(self, rows: Tensor, places: Tensor) -> Tensor:
        rotary, turned = self.options.rotary, self.options.turned
        if rotary is None or not turned:
            return rows
        return turn(rows, places, rotary, turned, interleaved=rotary.interleaved)

    def _best(self, scores: Tensor, own: Tensor) -> Tensor:
        """The chosen blocks by scores [batch, groups, query, block] of queries in the blocks `own` [batch, query]."""
        behind = (own[..., None] - torch.arange(scores.shape[-1], device=own.device))[:, None]
        known = scores > NEVER
        near = known & (behind > 0) & (behind < self.options.local)
        # The local blocks come before all others, and the own one, which is not among these, before them.
        ranked = scores.masked_fill(near, -NEVER).masked_fill(behind == 0, NEVER)
        found = ranked.topk(min(self.options.top, scores.shape[-1]) - 1, dim=-1)
        others = found.indices.masked_fill(found.values == NEVER, -1)
        return torch.cat([own[:, None, :, None].expand(*others.shape[:-1], 1), others], dim=-1)

    def _real(self, operands: AttentionInputs) -> Tensor:
        """The mask of real keys [batch, key], bool."""
        given = operands.key_padding_mask
        return operands.key.new_ones(operands.key.shape[:2], dtype=torch.bool) if given is None else given

    def _blocks(self, rows: Tensor) -> Tensor:
        """Split `rows` [batch, key, ...] into blocks [batch, block, within, ...], padded with zeros at the end."""
        missing = -rows.shape[1] % self.options.block
        filled = pad(rows, (0, 0) * (rows.dim() - 2) + (0, missing))
        return torch.unflatten(filled, 1, (-1, self.options.block))
