"""The layer of multi-head latent attention."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import Fields, Full, LayerState, Operands, RaggedBatch
from attn_core.batch import Rows
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_variants.compute.norm import RmsNorm
from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import Turns, rotate, rotated_size, turns_to
from attn_variants.dropping import dropping
from attn_variants.latent.ragged import attend_new
from attn_variants.latent.sizes import LatentShape
from attn_variants.paged_plan import PagedPlan, Reached
from attn_variants.plan import KernelPlan
from attn_variants.stepping import batch_turns, parted


class LatentAttentionLayer(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over inputs of `width`.

    Whole sequences expand latents to keys and values; steps attend over the latents themselves, the matrices of keys
    absorbed into the queries and those of values into the outputs. Learned: `query`, or `query_down`, `query_norm` and
    `query_up`; `latent`, `latent_norm`, `rotary_key`, `key_up`, `value_up`, `output`. Biases are where DeepSeek's are:
    into the latents and the rotary key, and in the output.
    """

    def __init__(self, shape: LatentShape) -> None:
        super().__init__()
        sizes, width, bias = shape.sizes, shape.width, shape.bias
        self.sizes = sizes
        self.dropout = shape.dropout
        self.rotary = shape.rotary
        self.rotated = rotated_size(shape.rotary, sizes.rotated)
        if sizes.query_latent is None:
            self.query = nn.Linear(width, sizes.heads * sizes.key, bias=False)
        else:
            self.query_down = nn.Linear(width, sizes.query_latent, bias=bias)
            self.query_norm = RmsNorm(sizes.query_latent, eps=shape.norm_eps)
            self.query_up = nn.Linear(sizes.query_latent, sizes.heads * sizes.key, bias=False)
        self.latent = nn.Linear(width, sizes.latent, bias=bias)
        self.latent_norm = RmsNorm(sizes.latent, eps=shape.norm_eps)
        self.rotary_key = nn.Linear(width, sizes.rotated, bias=bias)
        self.key_up = nn.Linear(sizes.latent, sizes.heads * sizes.nope, bias=False)
        self.value_up = nn.Linear(sizes.latent, sizes.heads * sizes.value, bias=False)
        self.output = nn.Linear(sizes.heads * sizes.value, width, bias=bias)
        self.expanded_spec, self.absorbed_spec = sizes.expanded(shape.mask), sizes.absorbed(shape.mask)
        self.use_kernel(None)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def use_kernel(self, name: str | None) -> None:
        """Compute with the kernel of this name from now on; None chooses the cheapest that accepts."""
        self._expanded = KernelPlan(self.expanded_spec, name)
        self._absorbed = KernelPlan(self.absorbed_spec, name)
        self._paged = PagedPlan(self.absorbed_spec, latent=True) if name is None else None
        # The newest token of a causal sequence sees all that is remembered, so nothing need be compared.
        self._newest = KernelPlan(dataclasses.replace(self.absorbed_spec, mask=Full()), name)

    def forward(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, width] -> [batch, tokens, width].

        `keep` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is given.
        """
        return self._out(self.attend_expanded(dropping(self._operands(query, source, keep), self)))

    def weights(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; arguments as of `forward`."""
        return attention_weights(self.expanded_spec, self._operands(query, source, keep))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; returns [tokens, width].

        Appends "latent" [tokens, latent], normed, and "rotary_key" [tokens, rotated], turned, to the state "latent".
        """
        turns = batch_turns(self.rotary, self.rotated, query, batch)
        rows = self.queries(query, turns)
        latent, turned = self.memory(query, turns)
        fresh = state["latent"].append({"latent": latent, "rotary_key": turned})
        reached = None if self._paged is None else self._paged.reach(query, state["latent"])
        if reached is not None:
            return self._out(self.attend_reached(rows, fresh, batch, reached))
        return self._out(attend_new(self, rows, fresh, batch, state["latent"]))

    def attend_start(self, query: Tensor, fresh: Fields) -> Tensor:
        """Outputs [batch, tokens, heads, value] of the start of a sequence, expanded as in training."""
        return self.attend_expanded(self.expand(query, (fresh["latent"], fresh["rotary_key"])))

    def attend_rows(self, query: Tensor, remembered: Rows, positions: Tensor | None) -> Tensor:
        """Outputs [requests, query, heads, value] of queries at `positions`, absorbed; None is one, the newest."""
        memory = remembered.fields["latent"], remembered.fields["rotary_key"]
        operands = dataclasses.replace(self.absorb(query, memory), keep=remembered.keep)
        if positions is None:
            return self.give_values(self._newest.run(operands))
        located = dataclasses.replace(operands, query_positions=positions, key_positions=remembered.positions)
        return self.attend_absorbed(located)

    def attend_reached(self, query: Tensor, fresh: Fields, batch: RaggedBatch, reached: Reached) -> Tensor:
        """Outputs [tokens, heads, value], absorbed over rows where they lie; starts of sequences expanded."""
        starts, others = parted(batch)
        out = self.give_values(reached.attend(self.carry(query), batch, {}, [span.request for span in others]))
        for span in starts:
            chunk = slice(span.start, span.stop)
            out[chunk] = self.attend_start(
                query[None, chunk], {name: rows[None, chunk] for name, rows in fresh.items()}
            )
        return out

    def queries(self, rows: Tensor, turns: Turns) -> Tensor:
        """Queries [..., tokens, heads, nope + rotated] of rows [..., tokens, width]."""
        if self.sizes.query_latent is None:
            projected = self.query(rows)
        else:
            projected = self.query_up(self.query_norm(self.query_down(rows)))
        nope, turned = self._parts(projected.unflatten(-1, (self.sizes.heads, self.sizes.key)))
        return torch.cat([nope, rotate(turned, turns, interleaved=self.rotary.interleaved)], dim=-1)

    def memory(self, rows: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """What is remembered of rows [..., tokens, width]: normed latents [..., tokens, latent] and turned rotary keys
        [..., tokens, rotated]."""
        turned = rotate(self.rotary_key(rows)[..., None, :], turns, interleaved=self.rotary.interleaved)
        return self.latent_norm(self.latent(rows)), turned.squeeze(-2)

    def expand(self, query: Tensor, memory: tuple[Tensor, Tensor]) -> Operands:
        """Queries [batch, tokens, heads, key] over the keys and values of every head."""
        latent, turned = memory
        key = self.key_up(latent).unflatten(-1, (self.sizes.heads, self.sizes.nope))
        shared = turned[..., None, :].expand(*key.shape[:-1], self.sizes.rotated)
        value = self.value_up(latent).unflatten(-1, (self.sizes.heads, self.sizes.value))
        return Operands(query=query, key=torch.cat([key, shared], dim=-1), value=value)

    def absorb(self, query: Tensor, memory: tuple[Tensor, Tensor]) -> Operands:
        """Queries that carry the matrices of keys, [batch, query, heads, latent + rotated], over remembered rows."""
        latent, turned = memory
        row = torch.cat([latent, turned], dim=-1)[..., None, :]
        return Operands(query=self.carry(query), key=row, value=latent[..., None, :])

    def carry(self, query: Tensor) -> Tensor:
        """Queries [..., heads, latent + rotated] that carry the matrices of keys, of queries [..., heads, key]."""
        nope, own = self._parts(query)
        into = self.key_up.weight.view(self.sizes.heads, self.sizes.nope, self.sizes.latent)
        return torch.cat([torch.einsum("...hn,hnc->...hc", nope, into), own], dim=-1)

    def attend_expanded(self, operands: Operands) -> Tensor:
        """Outputs [batch, query, heads, value] over expanded keys and values."""
        return self._expanded.run(operands)

    def attend_absorbed(self, operands: Operands) -> Tensor:
        """Outputs [batch, query, heads, value] over remembered rows."""
        return self.give_values(self._absorbed.run(operands))

    def give_values(self, latents: Tensor) -> Tensor:
        """The values [..., heads, value] of mean latents [..., heads, latent]."""
        out_of = self.value_up.weight.view(self.sizes.heads, self.sizes.value, self.sizes.latent)
        return torch.einsum("...hc,hvc->...hv", latents, out_of)

    def _parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Without positions [..., nope], and to be turned or turned [..., rotated]."""
        return query[..., : self.sizes.nope], query[..., self.sizes.nope :]

    def _operands(self, query: Tensor, source: Tensor | None, keep: Tensor | None) -> Operands:
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None: latent attention is over one sequence")
        turns = turns_to(self.rotary, self.rotated, query.shape[-2], query)
        operands = self.expand(self.queries(query, turns), self.memory(query, turns))
        return Operands(query=operands.query, key=operands.key, value=operands.value, keep=keep)

    def _out(self, out: Tensor) -> Tensor:
        projected: Tensor = self.output(out.flatten(-2))
        return projected
