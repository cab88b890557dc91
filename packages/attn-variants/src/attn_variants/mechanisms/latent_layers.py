"""Layers of multi-head latent attention (MLA) and of its factorised form (TransMLA)."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from attn_core import AttentionInputs, AttentionSpec, Fields, Full, LayerState, RaggedBatch
from attn_core.batch import PagedView, Rows
from attn_core.joint import weight_of
from attn_core.kernels.base import batch_invariant
from attn_core.masking import shares, wide
from torch import Tensor, nn

from attn_variants.attention.kernels import AttentionKernels, InPlaceAttention, PagedKernels
from attn_variants.attention.projections import refuse_source
from attn_variants.attention.step import batch_cos_sin, split_prefills
from attn_variants.compute.dropout import with_dropout
from attn_variants.compute.norm import RmsNorm
from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import CosSin, cos_sin_to, rotate, rotated_size
from attn_variants.mechanisms.latent_sizes import LatentShape


class OverLatents(Protocol):
    """The interface of a layer that caches latents and expands them to keys and values when they are attended to."""

    def attend_start(self, query: Tensor, fresh: Fields) -> Tensor:
        """Outputs [batch, tokens, heads, value] of a sequence's first queries [batch, tokens, heads, key], over
        `fresh`, the cache fields of the same tokens, [batch, tokens, ...] each."""
        ...

    def attend_rows(self, query: Tensor, remembered: Rows, positions: Tensor | None) -> Tensor:
        """Outputs [requests, query, heads, value] of queries at `positions` [requests, query], over the cached rows.

        `positions` is None if each request has one query, its newest token."""
        ...


def attend_new(layer: OverLatents, query: Tensor, fresh: Fields, batch: RaggedBatch, view: PagedView) -> Tensor:
    """Outputs [tokens, heads, value] of queries [tokens, heads, key]; `fresh` has already been appended to `view`.

    Requests with one new token are computed together, others one by one.
    """
    if batch.decoding:
        return layer.attend_rows(query[:, None], view.rows(range(batch.requests)), None)[:, 0]
    pieces: list[Tensor] = [query[:0]] * batch.requests
    single = [span for span in batch.spans() if span.stop - span.start == 1]
    if single:
        places = torch.tensor([span.start for span in single], device=query.device)
        outs = layer.attend_rows(query[places, None], view.rows([span.request for span in single]), None)
        for span, out in zip(single, outs, strict=True):
            pieces[span.request] = out
    for span in batch.spans():
        if span.stop - span.start < 2:
            continue
        chunk = slice(span.start, span.stop)
        if batch.contexts[span.request] == 0:
            start = {name: rows[None, chunk] for name, rows in fresh.items()}
            pieces[span.request] = layer.attend_start(query[None, chunk], start)[0]
        else:
            rows = view.rows([span.request])
            pieces[span.request] = layer.attend_rows(query[None, chunk], rows, batch.positions[None, chunk])[0]
    return torch.cat(pieces)


class LatentAttentionLayer(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over inputs of `hidden_size`.

    For whole sequences, latents are expanded to keys and values; steps, and all batch-invariant computations, attend
    over the latents themselves, with the key matrices absorbed into the queries and the value matrices into the
    outputs. Learned: `query`, or `query_down`, `query_norm` and `query_up`; `latent`, `latent_norm`, `rotary_key`,
    `key_up`, `value_up`, `output`. As in DeepSeek's code, only the projections to the latents and the rotary key, and
    the output, have biases.
    """

    read_weights = ("key_up", "value_up")
    """The linear layers whose matrices are read by `weight_of`, without calling the layers."""

    def __init__(self, shape: LatentShape) -> None:
        super().__init__()
        sizes, config = shape.sizes, shape.sizes.config
        hidden_size, bias = config.hidden_size, config.bias
        self.sizes = sizes
        self.dropout = config.dropout
        self.rotary = shape.rotary
        self.rotated = sizes.rotated if shape.rotary is None else rotated_size(shape.rotary, sizes.rotated)
        if sizes.query_latent is None:
            self.query = nn.Linear(hidden_size, sizes.heads * sizes.key, bias=False)
        else:
            self.query_down = nn.Linear(hidden_size, sizes.query_latent, bias=bias)
            self.query_norm = RmsNorm(sizes.query_latent, eps=shape.norm_eps)
            self.query_up = nn.Linear(sizes.query_latent, sizes.heads * sizes.key, bias=False)
        self.latent = nn.Linear(hidden_size, sizes.latent, bias=bias)
        self.latent_norm = RmsNorm(sizes.latent, eps=shape.norm_eps)
        self.rotary_key = nn.Linear(hidden_size, sizes.rotated, bias=bias)
        self.key_up = nn.Linear(sizes.latent, sizes.heads * sizes.nope, bias=False)
        self.value_up = nn.Linear(sizes.latent, sizes.heads * sizes.value, bias=False)
        self.output = nn.Linear(sizes.heads * sizes.value, hidden_size, bias=bias)
        self.expanded_spec, self.absorbed_spec = sizes.expanded(shape.mask), sizes.absorbed(shape.mask)
        self.use_kernel(None)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def use_kernel(self, name: str | None) -> None:
        """Use the kernel of this name from now on; None chooses the cheapest that supports each call."""
        self._expanded = AttentionKernels(self.expanded_spec, name)
        self._absorbed = AttentionKernels(self.absorbed_spec, name)
        self._paged = PagedKernels(self.absorbed_spec, latent=True) if name is None else None
        # The newest token of a causal sequence sees the whole cache, so no mask is needed.
        self._newest = AttentionKernels(dataclasses.replace(self.absorbed_spec, mask=Full()), name)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        if batch_invariant():
            refuse_source(source)
            cos_sin = None if self.rotary is None else cos_sin_to(self.rotary, self.rotated, query.shape[-2], query)
            operands = self.absorb(self.queries(query, cos_sin), self.memory(query, cos_sin))
            operands = dataclasses.replace(operands, key_padding_mask=key_padding_mask)
            return self._out(self.attend_absorbed(with_dropout(operands, self)))
        return self._out(self.attend_expanded(with_dropout(self._operands(query, source, key_padding_mask), self)))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        return attention_weights(self.expanded_spec, self._operands(query, source, key_padding_mask))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Appends the normalised "latent" [tokens, latent] and the rotated "rotary_key" [tokens, rotated] to the state
        "latent".
        """
        cos_sin = None if self.rotary is None else batch_cos_sin(self.rotary, self.rotated, query, batch)
        rows = self.queries(query, cos_sin)
        latent, turned = self.memory(query, cos_sin)
        fresh = state["latent"].append({"latent": latent, "rotary_key": turned})
        in_place = None if self._paged is None else self._paged.in_place_attention(query, state["latent"])
        out = None if in_place is None else self.attend_in_place(rows, fresh, batch, in_place)
        if out is not None:
            return self._out(out)
        return self._out(attend_new(self, rows, fresh, batch, state["latent"]))

    def attend_start(self, query: Tensor, fresh: Fields) -> Tensor:
        """Outputs [batch, tokens, heads, value] of the start of a sequence, by the expanded computation."""
        if batch_invariant():
            return self.attend_absorbed(self.absorb(query, (fresh["latent"], fresh["rotary_key"])))
        return self.attend_expanded(self.expand(query, (fresh["latent"], fresh["rotary_key"])))

    def attend_rows(self, query: Tensor, remembered: Rows, positions: Tensor | None) -> Tensor:
        """Outputs [requests, query, heads, value], absorbed; `positions` is None for one query each, the newest."""
        memory = remembered.fields["latent"], remembered.fields["rotary_key"]
        if positions is None and self._paged is not None and query.device.type == "cpu" and not batch_invariant():
            return self.attend_newest(query, memory, remembered.key_padding_mask)
        operands = dataclasses.replace(self.absorb(query, memory), key_padding_mask=remembered.key_padding_mask)
        if positions is None:
            return self.give_values(self._newest.run(operands))
        located = dataclasses.replace(operands, query_positions=positions, key_positions=remembered.positions)
        return self.attend_absorbed(located)

    def attend_newest(self, query: Tensor, memory: tuple[Tensor, Tensor], kept: Tensor | None) -> Tensor:
        """Outputs [requests, 1, heads, value] of the newest queries, over latents and rotary keys that are not joined:
        a copy of all that is cached would take longer than the products."""
        latent, turned = (wide(rows) for rows in memory)
        over, own = torch.split(wide(self.carry(query))[:, 0], [latent.shape[-1], turned.shape[-1]], dim=-1)
        scores = (over @ latent.transpose(1, 2) + own @ turned.transpose(1, 2)) * self.sizes.scale
        weights = scores.softmax(-1) if kept is None else shares(scores, kept[:, None])
        return self.give_values((weights @ latent)[:, None].to(query.dtype))

    def attend_in_place(
        self, query: Tensor, fresh: Fields, batch: RaggedBatch, in_place: InPlaceAttention
    ) -> Tensor | None:
        """Outputs [tokens, heads, value] by a kernel that reads the cache in place (absorbed); None if none can run.

        Starts of sequences use the expanded computation."""
        starts, others = split_prefills(batch)
        read = in_place.attend(self.carry(query), batch, {}, [span.request for span in others])
        if read is None:
            return None
        out = self.give_values(read)
        for span in starts:
            chunk = slice(span.start, span.stop)
            out[chunk] = self.attend_start(
                query[None, chunk], {name: rows[None, chunk] for name, rows in fresh.items()}
            )
        return out

    def queries(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Queries [..., tokens, heads, nope + rotated] of rows [..., tokens, hidden_size]."""
        if self.sizes.query_latent is None:
            projected = self.query(rows)
        else:
            projected = self.query_up(self.query_norm(self.query_down(rows)))
        nope, turned = self._parts(projected.unflatten(-1, (self.sizes.heads, self.sizes.key)))
        return torch.cat([nope, self._turned(turned, cos_sin)], dim=-1)

    def memory(self, rows: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        """The cache fields of rows [..., tokens, hidden_size]: normalised latents [..., tokens, latent] and rotated
        rotary keys [..., tokens, rotated]."""
        turned = self._turned(self.rotary_key(rows)[..., None, :], cos_sin)
        return self.latent_norm(self.latent(rows)), turned.squeeze(-2)

    def expand(self, query: Tensor, memory: tuple[Tensor, Tensor]) -> AttentionInputs:
        """The inputs of the expanded computation: queries [batch, tokens, heads, key], and keys and values per head."""
        latent, turned = memory
        key = self.key_up(latent).unflatten(-1, (self.sizes.heads, self.sizes.nope))
        shared = turned[..., None, :].expand(*key.shape[:-1], self.sizes.rotated)
        value = self.value_up(latent).unflatten(-1, (self.sizes.heads, self.sizes.value))
        return AttentionInputs(query=query, key=torch.cat([key, shared], dim=-1), value=value)

    def absorb(self, query: Tensor, memory: tuple[Tensor, Tensor]) -> AttentionInputs:
        """The inputs of the absorbed computation: absorbed queries over cached latents and rotary keys, as one head."""
        latent, turned = memory
        row = torch.cat([latent, turned], dim=-1)[..., None, :]
        return AttentionInputs(query=self.carry(query), key=row, value=latent[..., None, :])

    def carry(self, query: Tensor) -> Tensor:
        """Absorb the key matrices into queries [..., heads, key]: returns [..., heads, latent + rotated]."""
        nope, own = self._parts(query)
        into = weight_of(self.key_up).view(self.sizes.heads, self.sizes.nope, self.sizes.latent)
        return torch.cat([torch.einsum("...hn,hnc->...hc", nope, into), own], dim=-1)

    def attend_expanded(self, operands: AttentionInputs) -> Tensor:
        """Outputs [batch, query, heads, value] over expanded keys and values."""
        return self._expanded.run(operands)

    def attend_absorbed(self, operands: AttentionInputs) -> Tensor:
        """Outputs [batch, query, heads, value] over cached latents and rotary keys."""
        return self.give_values(self._absorbed.run(operands))

    def give_values(self, latents: Tensor) -> Tensor:
        """Project weighted means of latents [..., heads, latent] to values [..., heads, value]."""
        out_of = weight_of(self.value_up).view(self.sizes.heads, self.sizes.value, self.sizes.latent)
        return torch.einsum("...hc,hvc->...hv", latents, out_of)

    def _turned(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        """Rows [..., heads, rotated] with rotary positions, if the layer has any."""
        if self.rotary is None or cos_sin is None:
            return rows
        return rotate(rows, cos_sin, interleaved=self.rotary.interleaved)

    def _parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Split queries into the part without positions [..., nope] and the rotary part [..., rotated]."""
        return query[..., : self.sizes.nope], query[..., self.sizes.nope :]

    def _operands(self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> AttentionInputs:
        refuse_source(source)
        cos_sin = None if self.rotary is None else cos_sin_to(self.rotary, self.rotated, query.shape[-2], query)
        operands = self.expand(self.queries(query, cos_sin), self.memory(query, cos_sin))
        return AttentionInputs(
            query=operands.query, key=operands.key, value=operands.value, key_padding_mask=key_padding_mask
        )

    def _out(self, out: Tensor) -> Tensor:
        projected: Tensor = self.output(out.flatten(-2))
        return projected


class FactorisedLayer(nn.Module):
    """Multi-head attention of `spec` over inputs of `hidden_size`, with keys and values projected from a latent.

    Learned: `query`, `down` (hidden_size to latent, without bias), `key` and `value` (latent to heads), `output`. Keys
    are rotated after their projection, so the cached latents are independent of positions, and steps project the keys
    again.
    """

    def __init__(self, spec: AttentionSpec, *, hidden_size: int, latent: int, bias: bool, dropout: float = 0.0) -> None:
        super().__init__()
        heads = spec.heads
        self.spec = spec
        self.dropout = dropout
        self.rotated = rotated_size(spec.rotary, heads.key_size) if spec.rotary else 0
        self.query = nn.Linear(hidden_size, heads.query * heads.key_size, bias=bias)
        self.down = nn.Linear(hidden_size, latent, bias=False)
        self.key = nn.Linear(latent, heads.query * heads.key_size, bias=bias)
        self.value = nn.Linear(latent, heads.query * heads.value_size, bias=bias)
        self.output = nn.Linear(heads.query * heads.value_size, hidden_size, bias=bias)
        self.use_kernel(None)
        for linear in (self.query, self.down, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def use_kernel(self, name: str | None) -> None:
        """Use the kernel of this name from now on; None chooses the cheapest that supports each call."""
        self._kernels = AttentionKernels(self.spec, name)
        self._newest = AttentionKernels(dataclasses.replace(self.spec, mask=Full()), name)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences [batch, tokens, hidden_size] -> [batch, tokens, hidden_size].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` if a source is
        given.
        """
        return self._out(self._kernels.run(with_dropout(self._operands(query, source, key_padding_mask), self)))

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        return attention_weights(self.spec, self._operands(query, source, key_padding_mask))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Appends "latent" [tokens, latent] to the state "latent".
        """
        cos_sin = batch_cos_sin(self.spec.rotary, self.rotated, query, batch) if self.spec.rotary else None
        fresh = state["latent"].append({"latent": self.down(query)})
        return self._out(
            attend_new(self, self._turned(self._heads(self.query(query)), cos_sin), fresh, batch, state["latent"])
        )

    def attend_start(self, query: Tensor, fresh: Fields) -> Tensor:
        """Outputs [batch, tokens, heads, value] of the start of a sequence."""
        latent = fresh["latent"]
        return self._kernels.run(self._met(query, latent, self._turns(latent.shape[1], latent)))

    def attend_rows(self, query: Tensor, remembered: Rows, positions: Tensor | None) -> Tensor:
        """Outputs [requests, query, heads, value]; `positions` is None for one query each, the newest."""
        latent = remembered.fields["latent"].to(query.dtype)
        cos_sin = self._turns(int(remembered.positions.max()) + 1, latent)
        operands = self._met(query, latent, cos_sin.at(remembered.positions) if cos_sin else None)
        operands = dataclasses.replace(operands, key_padding_mask=remembered.key_padding_mask)
        if positions is None:
            return self._newest.run(operands)
        located = dataclasses.replace(operands, query_positions=positions, key_positions=remembered.positions)
        return self._kernels.run(located)

    def _operands(self, query: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> AttentionInputs:
        refuse_source(source)
        cos_sin = self._turns(query.shape[-2], query)
        operands = self._met(self._turned(self._heads(self.query(query)), cos_sin), self.down(query), cos_sin)
        return dataclasses.replace(operands, key_padding_mask=key_padding_mask)

    def _met(self, query: Tensor, latent: Tensor, cos_sin: CosSin | None) -> AttentionInputs:
        """The inputs of attention: queries [batch, query, heads, key], and keys and values of [batch, key, latent]."""
        key = self._turned(self._heads(self.key(latent)), cos_sin)
        return AttentionInputs(query=query, key=key, value=self._heads(self.value(latent)))

    def _turns(self, length: int, like: Tensor) -> CosSin | None:
        return cos_sin_to(self.spec.rotary, self.rotated, length, like) if self.spec.rotary else None

    def _turned(self, rows: Tensor, cos_sin: CosSin | None) -> Tensor:
        if cos_sin is None or self.spec.rotary is None:
            return rows
        return rotate(rows, cos_sin, interleaved=self.spec.rotary.interleaved)

    def _heads(self, rows: Tensor) -> Tensor:
        return torch.unflatten(rows, -1, (self.spec.heads.query, -1))

    def _out(self, out: Tensor) -> Tensor:
        projected: Tensor = self.output(torch.flatten(out, -2))
        return projected
