"""The layer of attention whose keys and values are factorised through one latent."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import AttentionSpec, Fields, Full, LayerState, Operands, RaggedBatch
from attn_core.batch import Rows
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_variants.compute.plain import attention_weights
from attn_variants.compute.rotary import Turns, rotate, rotated_size, turns_to
from attn_variants.dropping import dropping
from attn_variants.latent.ragged import attend_new
from attn_variants.plan import KernelPlan
from attn_variants.stepping import batch_turns


class FactorisedLayer(nn.Module):
    """Multi-head attention of `spec` over inputs of `width`, with keys and values made from a `latent` per token.

    Learned: `query`, `down` (width to latent, without bias), `key` and `value` (latent to heads), `output`. Keys are
    turned after they are made, so memory holds nothing of positions and a step makes the keys anew.
    """

    def __init__(self, spec: AttentionSpec, *, width: int, latent: int, bias: bool, dropout: float = 0.0) -> None:
        super().__init__()
        heads = spec.heads
        self.spec = spec
        self.dropout = dropout
        self.rotated = rotated_size(spec.rotary, heads.key_size) if spec.rotary else 0
        self.query = nn.Linear(width, heads.query * heads.key_size, bias=bias)
        self.down = nn.Linear(width, latent, bias=False)
        self.key = nn.Linear(latent, heads.query * heads.key_size, bias=bias)
        self.value = nn.Linear(latent, heads.query * heads.value_size, bias=bias)
        self.output = nn.Linear(heads.query * heads.value_size, width, bias=bias)
        self.use_kernel(None)
        for linear in (self.query, self.down, self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def use_kernel(self, name: str | None) -> None:
        """Compute with the kernel of this name from now on; None chooses the cheapest that accepts."""
        self._plan = KernelPlan(self.spec, name)
        self._newest = KernelPlan(dataclasses.replace(self.spec, mask=Full()), name)

    def forward(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, width] -> [batch, tokens, width].

        `keep` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is given.
        """
        return self._out(self._plan.run(dropping(self._operands(query, source, keep), self)))

    def weights(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; arguments as of `forward`."""
        return attention_weights(self.spec, self._operands(query, source, keep))

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; returns [tokens, width].

        Appends "latent" [tokens, latent] to the state "latent".
        """
        turns = batch_turns(self.spec.rotary, self.rotated, query, batch) if self.spec.rotary else None
        fresh = state["latent"].append({"latent": self.down(query)})
        return self._out(
            attend_new(self, self._turned(self._heads(self.query(query)), turns), fresh, batch, state["latent"])
        )

    def attend_start(self, query: Tensor, fresh: Fields) -> Tensor:
        """Outputs [batch, tokens, heads, value] of the start of a sequence."""
        latent = fresh["latent"]
        return self._plan.run(self._met(query, latent, self._turns(latent.shape[1], latent)))

    def attend_rows(self, query: Tensor, remembered: Rows, positions: Tensor | None) -> Tensor:
        """Outputs [requests, query, heads, value] of queries at `positions`; None is one query, the newest."""
        latent = remembered.fields["latent"].to(query.dtype)
        turns = self._turns(int(remembered.positions.max()) + 1, latent)
        operands = self._met(query, latent, turns.at(remembered.positions) if turns else None)
        operands = dataclasses.replace(operands, keep=remembered.keep)
        if positions is None:
            return self._newest.run(operands)
        located = dataclasses.replace(operands, query_positions=positions, key_positions=remembered.positions)
        return self._plan.run(located)

    def _operands(self, query: Tensor, source: Tensor | None, keep: Tensor | None) -> Operands:
        if source is not None:
            raise InvalidValue.of("source", tuple(source.shape), "None: this attention is over one sequence")
        turns = self._turns(query.shape[-2], query)
        operands = self._met(self._turned(self._heads(self.query(query)), turns), self.down(query), turns)
        return dataclasses.replace(operands, keep=keep)

    def _met(self, query: Tensor, latent: Tensor, turns: Turns | None) -> Operands:
        """Queries [batch, query, heads, key] over the keys and values of latents [batch, key, latent]."""
        key = self._turned(self._heads(self.key(latent)), turns)
        return Operands(query=query, key=key, value=self._heads(self.value(latent)))

    def _turns(self, length: int, like: Tensor) -> Turns | None:
        return turns_to(self.spec.rotary, self.rotated, length, like) if self.spec.rotary else None

    def _turned(self, rows: Tensor, turns: Turns | None) -> Tensor:
        if turns is None or self.spec.rotary is None:
            return rows
        return rotate(rows, turns, interleaved=self.spec.rotary.interleaved)

    def _heads(self, rows: Tensor) -> Tensor:
        return torch.unflatten(rows, -1, (self.spec.heads.query, -1))

    def _out(self, out: Tensor) -> Tensor:
        projected: Tensor = self.output(torch.flatten(out, -2))
        return projected
