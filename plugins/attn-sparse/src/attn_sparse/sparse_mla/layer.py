"""The layer of DeepSeek sparse attention over latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core import Fields, LayerState, RaggedBatch
from attn_core.errors import InvalidValue
from attn_core.joint import weight_of
from attn_core.kernels.base import batch_invariant
from attn_core.masking import wide
from torch import Tensor, nn

from attn_sparse.blocks import CompletedBlocks
from attn_sparse.dsa.indexer import turn
from attn_sparse.dsa.selection import Memory, SelectedTokens, Tile, masked_weights
from attn_sparse.sparse_mla.options import SparseMlaConfig
from attn_sparse.sparse_mla.pools import PooledIndexer, PooledMemory


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
            memory = self._memory(_latents(fields), fields, tile.positions, key_padding_mask)
            return self._out(self._over_latents(tile, memory).to(query.dtype))
        tile, memory = self._whole(query, source, key_padding_mask)
        return self._out(self.inner.read(tile, memory, self.expanded).to(query.dtype))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        tile, memory = self._whole(query, source, key_padding_mask)
        choice = memory.choose(tile, self.expanded.mask, self.options.top)
        return masked_weights(tile, memory, self.expanded, choice.tokens)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute the new tokens of many requests, [tokens, hidden_size] to [tokens, hidden_size].

        Appends "latent", "rotary_key" and "index" [tokens, size] to the state "latent", with rotary positions. With a
        pool index keys and gates are appended to the state "open", and those of pools that are complete to "pools".
        """
        places = batch.positions[None]
        tile, fresh = self._asked(query[None], places), self._remembered(query[None], places)
        fresh = self._append({name: rows[0] for name, rows in fresh.items()}, batch, state)
        if batch.decoding:
            one_each = Tile(*(part[0][:, None] for part in (tile.query, tile.index, tile.weights, tile.positions)))
            out = self._over_latents(one_each, self._cached(state, range(batch.requests)))[:, 0]
            return self._out(out.to(query.dtype))
        outs = []
        for span in batch.spans():
            at = slice(span.start, span.stop)
            part = next(Tile(*(one[:, at] for one in vars(tile).values())).pieces(span.stop - span.start))
            starts = batch.contexts[span.request] == 0 and span.stop - span.start > 1
            if starts and not batch_invariant():
                memory = self._expanded({name: rows[None, at] for name, rows in fresh.items()}, part.positions, None)
                outs.append(self.inner.read(part, memory, self.expanded)[0])
            else:
                outs.append(self._over_latents(part, self._cached(state, [span.request]))[0])
        return self._out(torch.cat(outs).to(query.dtype))

    def _append(self, fresh: Fields, batch: RaggedBatch, state: LayerState) -> Fields:
        """Append the cached fields of new tokens, and of the pools that they complete; returns those of tokens."""
        pool = self.options.pool
        if pool is None:
            return state["latent"].append(fresh)
        open_block = {name: fresh[name] for name in ("index", "gate")}
        kept = state["latent"].append({name: rows for name, rows in fresh.items() if name not in open_block})
        open_block = dict(state["open"].append(open_block))
        blocks = CompletedBlocks.of(batch, state["open"], pool)
        pools: Fields = {"index": fresh["index"][:0]}
        if blocks is not None:
            index = self.inner.indexer.pooled(blocks.fields["index"], blocks.fields["gate"], blocks.real)
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
        return self._asked(query, places), self._remembered(query, places)

    def _asked(self, rows: Tensor, places: Tensor) -> Tile:
        """The queries, scaled, and index queries with their weights, of rows [batch, tokens, hidden_size]."""
        latent = self.query_norm(self.query_down(rows))
        query = torch.unflatten(self.query_up(latent), -1, (self.options.num_heads, self.options.key))
        nope, rotary = torch.split(query, [self.options.nope, self.options.rotary_size], dim=-1)
        query = torch.cat([nope, self._turned(rotary, places)], dim=-1)
        indexer = self.inner.indexer
        return Tile(wide(query) * self.scale, indexer.queries(latent, places), indexer.weights(rows), places)

    def _remembered(self, rows: Tensor, places: Tensor) -> Fields:
        """The cached fields [batch, tokens, size] of rows [batch, tokens, hidden_size]."""
        indexer = self.inner.indexer
        index = indexer.turned_keys(indexer.keys(rows), places)
        fields = {"latent": self.latent_norm(self.latent(rows)), "index": index.to(rows.dtype)}
        if self.rotary_key is not None:
            fields["rotary_key"] = self._turned(self.rotary_key(rows)[..., None, :], places)[..., 0, :]
        return fields if self.options.pool is None else {**fields, "gate": indexer.pool_gate(rows.detach())}

    def _expanded(self, fields: Fields, places: Tensor, key_padding_mask: Tensor | None) -> Memory:
        """The keys and values of every head, of cached fields [batch, tokens, size]."""
        heads, latent = self.options.num_heads, fields["latent"]
        key = _joined(torch.unflatten(self.key_up(latent), -1, (heads, self.options.nope)), fields)
        value = torch.unflatten(self.value_up(latent), -1, (heads, self.options.value))
        return self._memory((wide(key), wide(value)), fields, places, key_padding_mask)

    def _memory(
        self, both: tuple[Tensor, Tensor], fields: Fields, places: Tensor, key_padding_mask: Tensor | None
    ) -> Memory:
        """Whole sequences, whose pools are computed of their cached fields; `both` are keys and values."""
        pool = self.options.pool
        if pool is None:
            return Memory(*both, wide(fields["index"]), places, key_padding_mask)
        kept = torch.ones_like(places, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
        index, last, real = self.inner.indexer.pools(fields["index"], fields["gate"], kept)
        return PooledMemory(*both, index, places, key_padding_mask, every=pool, last=last, kept=real)

    def _cached(self, state: LayerState, requests: Sequence[int]) -> Memory:
        """The cached latents of requests, as keys and values of all heads."""
        rows, pool = state["latent"].rows(requests), self.options.pool
        both = _latents(rows.fields)
        if pool is None:
            return Memory(*both, wide(rows.fields["index"]), rows.positions, rows.key_padding_mask)
        pools = state["pools"].rows(requests)
        of_pools = {"every": pool, "last": pools.positions, "kept": pools.key_padding_mask}
        return PooledMemory(*both, wide(pools.fields["index"]), rows.positions, rows.key_padding_mask, **of_pools)

    def _over_latents(self, tile: Tile, memory: Memory) -> Tensor:
        """Outputs [requests, query, heads, value] of queries over latents, which are not expanded."""
        heads = self.options.num_heads
        nope, rotary = torch.split(tile.query, [self.options.nope, self.options.rotary_size], dim=-1)
        into = torch.unflatten(wide(weight_of(self.key_up)), 0, (heads, -1))
        query = torch.cat([torch.einsum("...hn,hnc->...hc", nope, into), rotary], dim=-1)
        absorbed = Tile(query, tile.index, tile.weights, tile.positions)
        out_of = torch.unflatten(wide(weight_of(self.value_up)), 0, (heads, -1))
        return torch.einsum("...hc,hvc->...hv", self.inner.read(absorbed, memory, self.absorbed), out_of)

    def _turned(self, rows: Tensor, places: Tensor) -> Tensor:
        rotary = self.options.rotary
        if rotary is None or not self.options.rotary_size:
            return rows
        return turn(rows, places, rotary, self.options.rotary_size, interleaved=rotary.interleaved)

    def _out(self, out: Tensor) -> Tensor:
        projected: Tensor = self.output(out.flatten(-2))
        return projected


def _latents(fields: Fields) -> tuple[Tensor, Tensor]:
    """The keys and values that all heads share of cached fields."""
    latent = wide(fields["latent"])[..., None, :]
    return _joined(latent, {name: wide(field) for name, field in fields.items()}), latent


def _joined(key: Tensor, fields: Fields) -> Tensor:
    """Keys [..., heads, size] with the rotary part that all heads share behind, if there is one."""
    if "rotary_key" not in fields:
        return key
    return torch.cat([key, fields["rotary_key"][..., None, :].expand(*key.shape[:-1], -1)], dim=-1)
