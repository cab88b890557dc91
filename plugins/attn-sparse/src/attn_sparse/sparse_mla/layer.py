"""The layer of DeepSeek sparse attention over latents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from attn_core import AttentionInputs, Fields, LayerState, RaggedBatch, installed
from attn_core.batch import Rows, RowsInPlace, StaticBatch
from attn_core.errors import InvalidValue
from attn_core.joint import weight_of
from attn_core.kernels.attend import (
    LATENT,
    AttendKernel,
    PagedAttendKernel,
    PagedAttentionInputs,
    attend_problem,
    paged_problem,
)
from attn_core.kernels.base import batch_invariant
from attn_core.kernels.dispatch import Operation
from attn_core.masking import wide
from torch import Tensor, nn
from torch.autograd import forward_ad

from attn_sparse.blocks import CompletedBlocks
from attn_sparse.dsa.indexer import turn
from attn_sparse.dsa.selection import Memory, SelectedTokens, Tile, masked_weights
from attn_sparse.sparse_mla.options import SparseMlaConfig
from attn_sparse.sparse_mla.pools import PooledIndexer, PooledMemory

Keys = tuple[Tensor, ...]
"""Keys in parts, as in `Memory`."""


class SparseLatentLayer(nn.Module):
    """Multi-head latent attention to the tokens that an indexer selects (DeepSeek-AI 2025, arXiv 2512.02556).

    Whole sequences are computed over keys and values that are expanded from the latents; steps, and all batch-invariant
    computations, over the latents themselves, with the key matrices absorbed into the queries and the value matrices
    into the outputs. Learned: `query_down`, `query_norm`, `query_up`, `latent`, `latent_norm`, `rotary_key`, `key_up`,
    `value_up` and `output`, as in `mla`, also in which of them have biases, and `inner.indexer`, whose queries are
    computed from the normalised latent of the queries; with a pool also the gate that mixes index keys, `pool_gate` and
    `pool_bias`.
    """

    read_weights = ("key_up", "value_up")
    """The linear layers whose matrices are read by `weight_of`, without calling the layers."""

    def __init__(self, options: SparseMlaConfig) -> None:
        super().__init__()
        self.options = options
        width, heads, bias = options.hidden_size, options.num_heads, options.bias
        self.query_down = nn.Linear(width, options.query_latent, bias=bias)
        self.query_norm = nn.RMSNorm(options.query_latent, eps=options.norm_eps)
        self.query_up = nn.Linear(options.query_latent, heads * options.key, bias=False)
        self.latent = nn.Linear(width, options.latent, bias=bias)
        self.latent_norm = nn.RMSNorm(options.latent, eps=options.norm_eps)
        self.rotary_key = nn.Linear(width, options.rotary_size, bias=bias) if options.rotary_size else None
        self.key_up = nn.Linear(options.latent, heads * options.nope, bias=False)
        self.value_up = nn.Linear(options.latent, heads * options.value, bias=False)
        self.output = nn.Linear(heads * options.value, width, bias=bias)
        self.expanded, self.absorbed = options.expanded, options.absorbed
        self.inner = SelectedTokens(self.absorbed, options)
        if options.pool is not None:
            self.inner.indexer = PooledIndexer(options)
        # Queries are scaled once, before it is known what computes their scores.
        self.plain = Operation[Any](installed().kernels, AttendKernel, partial(attend_problem, options.scaled))
        paged = partial(paged_problem, options.absorbed_scaled)
        self.in_place = Operation[Any](installed().kernels, PagedAttendKernel, paged)
        self.scale: float = options.score_factor * float(options.key**-0.5)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and not name.startswith("inner."):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute whole sequences, [batch, tokens, hidden_size] to [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        if batch_invariant():
            tile, fields = self._whole_fields(query, source)
            memory = self._memory((_latents(fields), None), fields, tile.positions, key_padding_mask)
            return self._out(self._over_latents(tile, memory).to(query.dtype))
        tile, memory = self._whole(query, source, key_padding_mask)
        return self._out(self._over_expanded(tile, memory).to(query.dtype))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        tile, memory = self._whole(query, source, key_padding_mask)
        chosen = memory.tokens(tile, self.expanded.mask, self.options.top)
        return masked_weights(tile, memory, self.expanded, chosen)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Appends "latent", "rotary_key" and "index" [tokens, size] to the state "latent", with rotary positions. With a
        pool index keys and gates are appended to the state "open", and those of pools that are complete to "pools".
        """
        places = batch.positions[None]
        tile, fresh = self._asked(query[None], places, batch.longest), self._remembered(query[None], places)
        fresh = self._append({name: rows[0] for name, rows in fresh.items()}, batch, state)
        if batch.decoding:
            return self._out(self._values(self._decoded(self._absorbed(tile), batch, state)).to(query.dtype))
        outs = []
        for span in batch.spans():
            at = slice(span.start, span.stop)
            part, length = tile.at(at), span.stop - span.start
            if length > 1 and batch.contexts[span.request] == 0 and not batch_invariant():
                memory = self._expanded({name: rows[None, at] for name, rows in fresh.items()}, part.positions, None)
                outs.append(self._over_expanded(part, memory)[0])
                continue
            memory = self._cached(state["latent"].rows([span.request]), state, [span.request])
            outs.append(self._over_latents(part, memory)[0])
        return self._out(torch.cat(outs).to(query.dtype))

    def _decoded(self, tile: Tile, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Latents [requests, heads, latent] that the newest token of each request gets, its queries absorbed."""
        view, requests = state["latent"], range(batch.requests)
        if isinstance(batch, StaticBatch) or batch_invariant() or (cached := in_place(view)) is None:
            one_each = Tile(*(part[0][:, None] for part in (tile.query, tile.index, tile.weights, tile.positions)))
            memory = self._cached(view.rows(requests), state, requests)
            return self.inner.read(one_each, memory, self.absorbed)[:, 0]
        outs = []
        for request in requests:
            memory, one = self._newest(cached, batch, request, state), tile.at(slice(request, request + 1))
            out = self._read_in_place(one, memory, cached)
            outs.append(self.inner.read(one, memory, self.absorbed)[0] if out is None else out)
        return torch.cat(outs)

    def _read_in_place(self, tile: Tile, memory: Memory, cached: RowsInPlace) -> Tensor | None:
        """Outputs [1, heads, latent] of one query, by a kernel that reads the chosen rows where they lie; None if there
        is none for the CPU, and if all rows are read."""
        call: dict[str, Any] = {"dtype": tile.query.dtype, "device": tile.query.device.type, "rows": LATENT}
        if memory.numbers is None or call["device"] != "cpu" or torch.is_grad_enabled():
            return None
        if self.in_place.find(**call) is None:
            return None
        chosen = memory.tokens(tile, self.absorbed.mask, self.options.top)[0, 0]
        numbers = memory.numbers[0, chosen]
        rows = dataclasses.replace(cached, slot_mapping=numbers[:0], kv_indices=numbers[None], firsts=(0,))
        batch = RaggedBatch.of([1], [len(numbers) - 1], torch.tensor)
        inputs = PagedAttentionInputs(query=tile.query[0], batch=batch, rows=rows, requests=(0,))
        out: Tensor | None = self.in_place.run(lambda kernel: kernel.run(self.options.absorbed_scaled, inputs), **call)
        return out

    @property
    def _pooling(self) -> PooledIndexer:
        return cast("PooledIndexer", self.inner.indexer)

    def _append(self, fresh: Fields, batch: RaggedBatch, state: LayerState) -> Fields:
        """Append the cached fields of new tokens, and of the pools that they complete; returns those of tokens."""
        pool = self.options.pool
        if pool is None:
            kept: Fields = state["latent"].append(fresh)
            return kept
        open_block = {name: fresh[name] for name in ("index", "gate")}
        kept = state["latent"].append({name: rows for name, rows in fresh.items() if name not in open_block})
        open_block = dict(state["open"].append(open_block))
        blocks = CompletedBlocks.of(batch, state["open"], pool)
        pools: Fields = {"index": fresh["index"][:0]}
        if blocks is not None:
            index = self._pooling.pooled(blocks.fields["index"], blocks.fields["gate"], blocks.real)
            pools = blocks.in_order({"index": index}, fresh["index"].dtype)
        state["pools"].append(pools)
        return {**kept, **open_block}

    def _whole(self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> tuple[Tile, Memory]:
        tile, fields = self._whole_fields(query, source)
        return tile, self._expanded(fields, tile.positions, key_padding_mask)

    def _whole_fields(self, query: Tensor, source: Tensor | None) -> tuple[Tile, Fields]:
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None, as 'sparse_mla' is self-attention")
        places = torch.arange(query.shape[1], device=query.device).expand(query.shape[0], -1)
        return self._asked(query, places, query.shape[1]), self._remembered(query, places)

    def _asked(self, rows: Tensor, places: Tensor, keys: int) -> Tile:
        """The queries, scaled, and index queries with their weights, of rows [batch, tokens, hidden_size]; the latter
        are empty if none of so many keys is left out."""
        latent = self.query_norm(self.query_down(rows))
        query = torch.unflatten(self.query_up(latent), -1, (self.options.num_heads, self.options.key))
        nope, rotary = torch.split(query, [self.options.nope, self.options.rotary_size], dim=-1)
        query = torch.cat([nope, self._turned(rotary, places)], dim=-1)
        query, indexer = wide(query) * self.scale, self.inner.indexer
        if not self.options.scores(keys) and not self.inner.learns:
            return Tile(query, query[..., :0, :0], query[..., :0, 0], places)
        return Tile(query, indexer.queries(latent, places), indexer.weights(rows), places)

    def _remembered(self, rows: Tensor, places: Tensor) -> Fields:
        """The cached fields [batch, tokens, size] of rows [batch, tokens, hidden_size]."""
        indexer = self.inner.indexer
        fields = {"latent": self.latent_norm(self.latent(rows)), "index": indexer.remembered(rows, places)}
        if self.rotary_key is not None:
            fields["rotary_key"] = self._turned(self.rotary_key(rows)[..., None, :], places)[..., 0, :]
        return fields if self.options.pool is None else {**fields, "gate": self._pooling.pool_gate(rows.detach())}

    def _expanded(self, fields: Fields, places: Tensor, key_padding_mask: Tensor | None) -> Memory:
        """The keys and values of every head, of cached fields [batch, tokens, size]."""
        heads, latent = self.options.num_heads, fields["latent"]
        key = torch.unflatten(self.key_up(latent), -1, (heads, self.options.nope))
        if "rotary_key" in fields:
            key = torch.cat([key, fields["rotary_key"][..., None, :].expand(*key.shape[:-1], -1)], dim=-1)
        value = torch.unflatten(self.value_up(latent), -1, (heads, self.options.value))
        return self._memory(((wide(key),), wide(value)), fields, places, key_padding_mask)

    def _memory(
        self, both: tuple[Keys, Tensor | None], fields: Fields, places: Tensor, key_padding_mask: Tensor | None
    ) -> Memory:
        """Whole sequences, whose pools are computed of their cached fields; `both` are keys and values."""
        pool = self.options.pool
        if pool is None:
            return Memory(*both, wide(fields["index"]), places, key_padding_mask)
        kept = torch.ones_like(places, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        index, last, real = self._pooling.pools(fields["index"], fields["gate"], kept)
        return PooledMemory(*both, index, places, key_padding_mask, every=pool, last=last, kept=real)

    def _newest(self, cached: RowsInPlace, batch: RaggedBatch, request: int, state: LayerState) -> Memory:
        """What the newest token of a request reads of the cache: with `numbers`, if it does not attend to all."""
        numbers = cached.kv_indices[request, : batch.contexts[request] + 1]
        whole = len(numbers) <= self.options.most
        read = {name for name in cached.fields if whole or name == "index"}
        fields = {
            name: (cached.of(name, numbers) if name in read else cached.fields[name])[None] for name in cached.fields
        }
        rows = Rows(fields, torch.arange(len(numbers), device=numbers.device)[None], None)
        return self._cached(rows, state, [request], None if whole else numbers[None])

    def _cached(self, rows: Rows, state: LayerState, requests: Sequence[int], numbers: Tensor | None = None) -> Memory:
        """The cached latents of requests, as keys and values of all heads; see `Memory` for `numbers`."""
        pool, kept = self.options.pool, rows.key_padding_mask
        keys = _latents(rows.fields)
        if pool is None:
            return Memory(keys, None, wide(rows.fields["index"]), rows.positions, kept, numbers)
        pools = state["pools"].rows(requests)
        of_pools = {"every": pool, "last": pools.positions, "kept": pools.key_padding_mask}
        return PooledMemory(keys, None, wide(pools.fields["index"]), rows.positions, kept, numbers, **of_pools)

    def _over_expanded(self, tile: Tile, memory: Memory) -> Tensor:
        """Outputs [batch, query, heads, value] over expanded keys and values: by a kernel, if a query attends to all
        that it sees and the indexer does not learn."""
        if self.inner.learns or not memory.chooses_all(self.options.top) or torch.compiler.is_compiling():
            return self.inner.read(tile, memory, self.expanded)
        kept, query = memory.key_padding_mask, tile.query
        inputs = AttentionInputs(query=query, key=memory.keys[0], value=memory.values, key_padding_mask=kept)
        call: dict[str, Any] = {"dtype": query.dtype, "device": query.device.type, "padded": kept is not None}
        call |= {"gradients": torch.is_grad_enabled(), "forward_mode": forward_ad._current_level >= 0}  # noqa: SLF001 -- as `AttentionKernels` asks it
        out: Tensor | None = self.plain.run(lambda kernel: kernel.run(self.options.scaled, inputs), **call)
        return self.inner.read(tile, memory, self.expanded) if out is None else out

    def _over_latents(self, tile: Tile, memory: Memory) -> Tensor:
        """Outputs [requests, query, heads, value] of queries over latents, which are not expanded."""
        return self._values(self.inner.read(self._absorbed(tile), memory, self.absorbed))

    def _absorbed(self, tile: Tile) -> Tile:
        """The tile with queries over latents."""
        nope, rotary = torch.split(tile.query, [self.options.nope, self.options.rotary_size], dim=-1)
        into = torch.unflatten(wide(weight_of(self.key_up)), 0, (self.options.num_heads, -1))
        query = torch.cat([torch.einsum("...hn,hnc->...hc", nope, into), rotary], dim=-1)
        return dataclasses.replace(tile, query=query)

    def _values(self, latents: Tensor) -> Tensor:
        """The values [..., heads, value] of latents [..., heads, latent]."""
        out_of = torch.unflatten(wide(weight_of(self.value_up)), 0, (self.options.num_heads, -1))
        return torch.einsum("...hc,hvc->...hv", latents, out_of)

    def _turned(self, rows: Tensor, places: Tensor) -> Tensor:
        rotary = self.options.rotary
        if rotary is None or not self.options.rotary_size:
            return rows
        return turn(rows, places, rotary, self.options.rotary_size, interleaved=rotary.interleaved)

    def _out(self, out: Tensor) -> Tensor:
        projected: Tensor = self.output(out.flatten(-2))
        return projected


def in_place(view: Any) -> RowsInPlace | None:
    """The rows of a view where they lie; None if its store keeps them otherwise."""
    return view.in_place() if hasattr(view, "in_place") else None


def _latents(fields: Fields) -> Keys:
    """The parts of the keys that all heads share, of which the first are the values, too."""
    return tuple(fields[name][..., None, :] for name in ("latent", "rotary_key") if name in fields)
