"""The indexer that scores blocks of keys, and attention to the blocks that it selects."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from attn_core import (
    Attend,
    AttentionInputs,
    AttentionSpec,
    Causal,
    Fields,
    InnerAttention,
    RaggedBatch,
    installed,
)
from attn_core.batch import RowsInPlace
from attn_core.kernels.attend import PagedAttendKernel, PagedAttentionInputs, paged_problem
from attn_core.kernels.base import batch_invariant
from attn_core.kernels.dispatch import Operation
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksDispatcher
from attn_core.masking import positions, seen_pairs, shares, wide
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attn_sparse.dsa.indexer import divergence, turn
from attn_sparse.dsa.selection import LearnsFromAttention
from attn_sparse.indexed_blocks.options import TILE, IndexedBlocksConfig

NEVER = float("-inf")


class HeadRows:
    """A cached field [rows, groups, size] as rows of one head [rows * groups, 1, size], which are not copied.

    `each` is the distance between tokens, and `group` that between groups, in such rows: caches differ in which of both
    axes comes first.
    """

    def __init__(self, field: Tensor) -> None:
        tokens, groups, size = field.shape
        if field.stride(2) != 1 or field.stride(0) % size or field.stride(1) % size:
            field = field.contiguous()
        self.each, self.group = field.stride(0) // size, field.stride(1) // size
        rows = 1 + (tokens - 1) * self.each + (groups - 1) * self.group
        self.rows = field.as_strided((rows, 1, size), (size, size, 1))

    def numbers(self, tokens: Tensor) -> Tensor:
        """The rows [requests, groups, ...] of tokens [requests, groups, ...], int64."""
        groups = torch.arange(tokens.shape[1], device=tokens.device) * self.group
        return tokens * self.each + groups.view(-1, *[1] * (tokens.dim() - 2))


class IndexedBlocksAttention(LearnsFromAttention, InnerAttention, nn.Module):
    """Each group of query heads attends to the newest blocks and to those whose best key the group's index head
    scores highest.

    Learned: `query` (an index head for each group), `key` (one for all), `nn.Linear` without bias, and their norms
    `query_norm` and `key_norm`. The selection has no gradient: they learn from the loss of training passes, the
    divergence of the softmax of scores over the chosen blocks but the own one from the attention that these get.
    """

    computes_itself = True

    def __init__(self, spec: AttentionSpec, options: IndexedBlocksConfig) -> None:
        super().__init__()
        self.spec, self.options = spec, options
        self.plan = SelectedBlocksDispatcher(installed().kernels, spec.heads)
        self.groups, size = spec.heads.key_value, options.index_size
        heads = dataclasses.replace(spec.heads, query=spec.heads.query // self.groups, key_value=1)
        self.each_group = AttentionSpec(heads=heads, mask=Causal())
        self.one_group, self.all_groups = (
            Operation[Any](installed().kernels, PagedAttendKernel, partial(paged_problem, each))
            for each in (self.each_group, spec)
        )
        self.query = nn.Linear(options.hidden_size, self.groups * size, bias=False)
        self.key = nn.Linear(options.hidden_size, size, bias=False)
        self.query_norm = nn.RMSNorm(size, eps=options.norm_eps or 1e-6)
        self.key_norm = nn.RMSNorm(size, eps=options.norm_eps or 1e-6)

    def remember(self, rows: Tensor, positions: Tensor) -> Fields:
        """The field "index": index keys [..., index_size] of hidden states [..., hidden_size], with rotary
        positions."""
        batched = rows.detach() if rows.dim() == 3 else rows.detach()[None]
        key = self._turned(wide(self.key_norm(self.key(batched)))[:, :, None], positions[None])
        return {"index": key.to(rows.dtype).view(*rows.shape[:-1], key.shape[-1])}

    def forward(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Outputs [batch, query, heads, value_size]."""
        if self.learns:
            self.keep_divergence(self._divergences(rows, operands), operands.key_padding_mask)
        if rows.shape[1] == 0 or (self.options.reads_all(operands.key.shape[1]) and not batch_invariant()):
            return attend(operands)
        chosen, places = self._chosen(rows, operands)
        query = torch.unflatten(wide(operands.query), 2, (self.groups, -1)).transpose(1, 2)
        key, value, real = map(self._blocks, (operands.key, operands.value, self._real(operands)))
        key, value = (wide(part).permute(0, 3, 1, 2, 4).contiguous() for part in (key, value))
        selected = SelectedBlocks(query * self.spec.heads.key_size**-0.5, chosen, places)
        out = self.plan.run(selected, KeyBlocks(key, value, real), operands)
        return out.permute(0, 2, 1, 3, 4).flatten(2, 3).to(operands.value.dtype)

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- computed here
        """Attention weights [batch, heads, query, key], zero outside the chosen blocks."""
        chosen, places = self._chosen(rows, operands)
        return self._weights(operands, places, self._marked(chosen, operands)).flatten(1, 2)

    def _weights(self, operands: AttentionInputs, places: Tensor, read: Tensor) -> Tensor:
        """The weights [batch, groups, shared, query, key] of queries at `places` [batch, query], which read the blocks
        `read` [batch, groups, query, block], bool."""
        read = read.repeat_interleave(self.options.block, dim=-1)[..., : operands.key.shape[1]]
        query = torch.unflatten(wide(operands.query), 2, (self.groups, -1)).permute(0, 2, 3, 1, 4)
        scores = query @ wide(operands.key).permute(0, 2, 3, 1)[:, :, None] * self.spec.heads.key_size**-0.5
        seen = seen_pairs(self.spec.mask, places, positions(operands)[1], operands.key_padding_mask)
        return shares(scores, (read & seen)[:, :, None])

    def _marked(self, chosen: Tensor, operands: AttentionInputs) -> Tensor:
        """Which blocks are `chosen` [..., n], [..., block], bool."""
        blocks = -(-operands.key.shape[1] // self.options.block)
        # The index -1, which means no block, is replaced by one after the last block.
        read = torch.zeros(*chosen.shape[:-1], blocks + 1, dtype=torch.bool, device=chosen.device)
        return read.scatter(-1, chosen.masked_fill(chosen < 0, blocks), value=True)[..., :blocks]

    def _divergences(self, rows: Tensor, operands: AttentionInputs) -> Tensor:
        """KL(p ‖ softmax(scores / √size)) over the chosen blocks but the own one, the mean over groups, [batch, query],
        where p is the mean attention of the group's heads to them; scores are not stored for the backward pass."""
        chosen, places = self._chosen(rows, operands)
        found = []
        for start in range(0, rows.shape[1], TILE):
            at = slice(start, start + TILE)
            part = dataclasses.replace(operands, query=operands.query[:, at].detach(), key=operands.key.detach())
            given = rows[:, at].detach(), places[:, at], chosen[:, :, at], part
            found.append(checkpoint(self._tile_divergence, *given, use_reentrant=False))
        return torch.cat(found, dim=1)

    def _tile_divergence(self, rows: Tensor, places: Tensor, chosen: Tensor, operands: AttentionInputs) -> Tensor:
        index = wide(operands.fields["index"])
        products = self._asked(rows, places).flatten(1, 2) @ index.transpose(1, 2)
        products = products.masked_fill(~self._real(operands)[:, None], NEVER)
        scores = self._by_block(torch.unflatten(products, 1, (self.groups, -1)), NEVER).amax(-1)
        with torch.no_grad():
            weights = self._weights(operands, places, self._marked(chosen, operands)).mean(2)
            others = self._marked(chosen[..., 1:], operands)
            shared = self._by_block(weights, 0.0).sum(-1) * others
            shared = shared / shared.sum(-1, keepdim=True).clamp(min=torch.finfo(shared.dtype).tiny)
        parts = (part.flatten(0, 1) for part in (scores * index.shape[-1] ** -0.5, shared[:, :, None], others))
        return torch.unflatten(divergence(*parts), 0, (-1, self.groups)).mean(1)

    def _by_block(self, rows: Tensor, missing: float) -> Tensor:
        """Rows [..., key] as [..., block, within]."""
        block = self.options.block
        return torch.unflatten(pad(rows, (0, -rows.shape[-1] % block), value=missing), -1, (-1, block))

    def _asked(self, rows: Tensor, places: Tensor) -> Tensor:
        """Index queries [batch, groups, query, size] of rows at `places` [batch, query], at least float32."""
        query = self.query_norm(torch.unflatten(self.query(rows), -1, (self.groups, -1)))
        return self._turned(wide(query), places).transpose(1, 2)

    def decode(self, rows: Tensor, query: Tensor, batch: RaggedBatch, cached: RowsInPlace) -> Tensor | None:
        """Outputs [requests, heads, value_size] of one query per request, which reads the index keys of all tokens and
        the keys and values of its blocks."""
        block, numbers = self.options.block, cached.kv_indices
        if self.options.reads_all(batch.longest):
            inputs = PagedAttentionInputs(query=query, batch=batch, rows=cached, requests=tuple(range(batch.requests)))
            return self._attended(self.all_groups, self.spec, inputs)
        own, best = batch.positions // block, self._best_of_cached(rows, batch, cached)
        # The blocks that there are come last and the own one, which is incomplete, behind them.
        chosen = self._best(best[:, :, None], own[:, None])[:, :, 0].flip(-1)
        tokens = (chosen[..., None] * block + torch.arange(block, device=rows.device)).flatten(2)
        tokens = tokens.clamp(0, numbers.shape[1] - 1).flatten(1)
        slots = torch.unflatten(numbers.gather(1, tokens), 1, (self.groups, -1))
        counts = [min(chosen.shape[-1], c // block + 1) * block - block + c % block + 1 for c in batch.contexts]
        before = [slots.shape[-1] - block + c % block + 1 - n for c, n in zip(batch.contexts, counts, strict=True)]
        key, value = (HeadRows(cached.fields[name]) for name in ("key", "value"))
        shared = torch.unflatten(query, 1, (self.groups, -1))
        out = self._by_kernel(shared, (key, value), key.numbers(slots), (before, counts))
        if out is not None:
            return out
        place = torch.arange(slots.shape[-1], device=rows.device)
        first, count = (torch.tensor(each, device=rows.device)[:, None] for each in (before, counts))
        known = ((place >= first) & (place < first + count))[:, None, None]
        keys, values = (
            wide(part.rows[:, 0].index_select(0, part.numbers(slots).flatten()).view(*slots.shape, -1))
            for part in (key, value)
        )
        weights = shares(wide(shared) * self.spec.heads.key_size**-0.5 @ keys.transpose(2, 3), known)
        return (weights @ values).flatten(1, 2).to(cached.fields["value"].dtype)

    def _best_of_cached(self, rows: Tensor, batch: RaggedBatch, cached: RowsInPlace) -> Tensor:
        """The best score of each earlier block [requests, groups, block], -inf where a request has none."""
        block = self.options.block
        blocks = max(batch.contexts) // block + 1
        query = self._asked(rows[:, None], batch.positions[:, None])[:, :, 0]
        best = query.new_full((len(rows), self.groups, blocks), NEVER)
        for request, context in enumerate(batch.contexts):
            earlier = context // block
            key = wide(cached.of("index", cached.kv_indices[request, : earlier * block]))
            best[request, :, :earlier] = (query[request] @ key.T).view(self.groups, earlier, block).amax(-1)
        return best

    def _by_kernel(
        self, query: Tensor, rows: tuple[HeadRows, HeadRows], numbers: Tensor, seen: tuple[list[int], list[int]]
    ) -> Tensor | None:
        """`decode` by a kernel that reads the rows of each group in place, `numbers` [requests, groups, row], each
        group as a request; None if there is no such kernel."""
        (key, value), (requests, groups) = rows, numbers.shape[:2]
        before, counts = ([each for each in part for _ in range(groups)] for part in seen)
        if (key.each, key.group) != (value.each, value.group):
            return None
        batch = RaggedBatch.of([1] * len(counts), [count - 1 for count in counts], numbers.new_tensor)
        cached = RowsInPlace(
            fields={"key": key.rows, "value": value.rows},
            slot_mapping=numbers[:0, 0, 0],
            kv_indices=numbers.flatten(0, 1),
            firsts=tuple(-count for count in before),
        )
        inputs = PagedAttentionInputs(
            query=query.flatten(0, 1), batch=batch, rows=cached, requests=tuple(range(len(counts)))
        )
        out = self._attended(self.one_group, self.each_group, inputs)
        return None if out is None else out.view(requests, -1, out.shape[-1])

    def _attended(self, paged: Operation[Any], spec: AttentionSpec, inputs: PagedAttentionInputs) -> Tensor | None:
        """Outputs [tokens, heads, value_size] by a kernel that reads the cache in place; None if there is none."""
        query = inputs.query
        out: Tensor | None = paged.run(
            lambda kernel: kernel.run(spec, inputs), dtype=query.dtype, device=query.device.type
        )
        return out

    def _chosen(self, rows: Tensor, operands: AttentionInputs) -> tuple[Tensor, Tensor]:
        """The blocks [batch, groups, query, chosen], int64, the query's own first, -1 for none, and the positions of
        the queries [batch, query]."""
        places = positions(operands)[0].expand(rows.shape[0], -1)
        with torch.no_grad():
            index = wide(operands.fields["index"])
            best = self._best_of(self._asked(rows, places), index, operands.key_padding_mask)
            return self._best(best, places // self.options.block), places

    def _best_of(self, query: Tensor, key: Tensor, kept: Tensor | None) -> Tensor:
        """The best score [batch, groups, query, block] of the earlier blocks, for index queries [batch, groups, query,
        size] that are aligned to the end of index keys [batch, key, size]; arbitrary for a query's own block and later
        ones."""
        block, queries, keys = self.options.block, query.shape[2], key.shape[1]
        best = query.new_full((*query.shape[:3], -(-keys // block)), NEVER)
        tiles, stop = self.options.scored(queries, keys), 0
        for tile, earlier in [(queries, (keys - 1) // block * block)] if torch.compiler.is_compiling() else tiles:
            at = slice(stop, stop := stop + tile)
            if earlier == 0:
                continue
            scores = query[:, :, at].flatten(1, 2) @ key[:, :earlier].transpose(1, 2)
            if kept is not None:
                scores = scores.masked_fill(~kept[:, None, :earlier], NEVER)
            of_blocks = scores.view(*query.shape[:2], tile, earlier // block, block)
            best[:, :, at, : earlier // block] = of_blocks.amax(-1)
        return best

    def _turned(self, rows: Tensor, places: Tensor) -> Tensor:
        rotary, turned = self.options.rotary, self.options.turned
        if rotary is None or not turned:
            return rows
        return turn(rows, places, rotary, turned, interleaved=rotary.interleaved)

    def _best(self, scores: Tensor, own: Tensor) -> Tensor:
        """The chosen blocks by scores [batch, groups, query, block] of queries in the blocks `own` [batch, query]."""
        behind = (own[..., None] - torch.arange(scores.shape[-1], device=own.device))[:, None]
        near = (scores > NEVER) & (behind < self.options.local)
        # The local blocks come before all others, and the own one, which is not among these, before them.
        ranked = scores.masked_fill(near, -NEVER).masked_fill(behind <= 0, NEVER)
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
