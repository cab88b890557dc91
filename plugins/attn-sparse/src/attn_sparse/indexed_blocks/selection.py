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
from attn_core.kernels.dispatch import Operation
from attn_core.kernels.selected import KeyBlocks, SelectedBlocks, SelectedBlocksDispatcher
from attn_core.masking import positions, seen_pairs, shares, wide
from torch import Tensor, nn
from torch.nn.functional import pad

from attn_sparse.dsa.indexer import turn
from attn_sparse.indexed_blocks.options import IndexedBlocksConfig

NEVER = float("-inf")


def neighbours(field: Tensor, numbers: Tensor) -> Tensor:
    """The rows of a field at `numbers` [row], int64, not copied where they lie one behind the other."""
    first = int(numbers[0])
    if bool((numbers == torch.arange(first, first + len(numbers), device=numbers.device)).all()):
        return field[first : first + len(numbers)]
    return field.index_select(0, numbers)


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
        heads = dataclasses.replace(spec.heads, query=spec.heads.query // self.groups, key_value=1)
        self.each_group = AttentionSpec(heads=heads, mask=Causal())
        self.paged: Operation[Any] = Operation(
            installed().kernels, PagedAttendKernel, partial(paged_problem, self.each_group)
        )
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

    def decode(self, rows: Tensor, query: Tensor, batch: RaggedBatch, cached: RowsInPlace) -> Tensor:
        """Outputs [requests, heads, value_size] of one query per request, which reads the index keys of all tokens and
        the keys and values of its blocks."""
        block, numbers = self.options.block, cached.kv_indices
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
        """The best score of each block [requests, groups, block], -inf where a request has none."""
        blocks = max(batch.contexts) // self.options.block + 1
        query = self.query_norm(torch.unflatten(self.query(rows), -1, (self.groups, -1)))
        query = self._turned(wide(query)[:, None], batch.positions[:, None])[:, 0]
        scores = query.new_full((len(rows), self.groups, blocks * self.options.block), NEVER)
        for request, context in enumerate(batch.contexts):
            key = wide(neighbours(cached.fields["index"], cached.kv_indices[request, : context + 1]))
            places = torch.arange(context + 1, device=rows.device)[None]
            key = self._turned(key[None, :, None], places)[0, :, 0]
            torch.matmul(query[request], key.T, out=scores[request, :, : context + 1])
        return torch.unflatten(scores, -1, (blocks, -1)).amax(-1)

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
        out: Tensor | None = self.paged.run(
            lambda kernel: kernel.run(self.each_group, inputs), dtype=query.dtype, device=query.device.type
        )
        return None if out is None else out.view(requests, -1, out.shape[-1])

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
