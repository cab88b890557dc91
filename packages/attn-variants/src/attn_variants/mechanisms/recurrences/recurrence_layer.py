"""Base class of the layers of linear recurrences, and their short convolution."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from attn_core import Heads, LayerState, RaggedBatch
from attn_core.kernels.plans import RecurrencePlan
from attn_core.kernels.recurrence import Steps
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import silu

from attn_variants.mechanisms.layer_utils import by_heads, fresh_linear, multiplied_in, refuse_source
from attn_variants.mechanisms.recurrences.scan import effective_weights


class ShortConvolution(nn.Module):
    """Each channel is the SiLU of a weighted sum of its last `taps` values.

    Learned: `weight` [channels, taps], the newest token last, uniform in ±1/√taps as torch's convolutions.
    """

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter(torch.empty(channels, taps).uniform_(-(taps**-0.5), taps**-0.5))

    def forward(self, rows: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows [batch, tokens, channels] convolved, and the last taps - 1 rows, [batch, taps - 1, channels].

        `tail` are those before the first row; None is zeros, the start of a sequence.
        """
        batch, tokens, channels = rows.shape
        if tail is None:
            tail = rows.new_zeros(batch, self.taps - 1, channels)
        known = torch.cat([tail.to(rows.dtype), rows], dim=1)
        weight = self.weight.to(rows.dtype)
        summed = known[:, :tokens] * weight[:, 0]
        for tap in range(1, self.taps):
            summed = torch.addcmul(summed, known[:, tap : tap + tokens], weight[:, tap])
        return silu(summed), known[:, tokens:]


class Inputs(NamedTuple):
    """What the steps of some tokens are made of.

    `rows` [batch, tokens, width]; `query`, `key`, `value` [batch, tokens, heads, size], projected, and convolved where
    the layer has a convolution; `positions` [batch or 1, tokens], int64.
    """

    rows: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor


class RecurrenceLayer(nn.Module):
    """A linear recurrence over inputs of `width`; a subclass makes its `steps` and may `finish` what they read.

    `chunk` tokens meet pair by pair, which changes the speed only; `taps` of a short convolution over queries, keys
    and values, 0 for none; `plan` chooses the kernel. Learned: `query`, `key`, `value`, `output` (`nn.Linear`) and
    `convolution`. What is remembered is at least float32, whatever the inputs are; so are the steps, but for kernels
    that take queries, keys and values of 16 bits.
    """

    def __init__(self, heads: Heads, *, width: int, bias: bool, chunk: int, taps: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.chunk = chunk
        self.plan = RecurrencePlan()
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        self.query = fresh_linear(width, into, bias=bias)
        self.key = fresh_linear(width, into, bias=bias)
        self.value = fresh_linear(width, out, bias=bias)
        self.output = fresh_linear(out, width, bias=bias)
        self.convolution = ShortConvolution(2 * into + out, taps) if taps else None

    @abstractmethod
    def steps(self, inputs: Inputs) -> Steps:
        """The steps of some tokens."""

    def finish(self, out: Tensor, rows: Tensor) -> Tensor:
        """The layer's output [batch, tokens, width] of what was read, [batch, tokens, heads, value_size]."""
        projected: Tensor = self.output(out.flatten(-2).to(rows.dtype))
        return projected

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend over whole sequences [batch, tokens, width] -> [batch, tokens, width].

        `key_padding_mask` [batch, tokens], bool, True where a token is real. Raises `InvalidValue` where a source is
        given.
        """
        steps, _ = self.read(query, source, key_padding_mask)
        return self.finish(self.attend(steps, multiplied_in(query)), query)

    def attend(self, steps: Steps, computed: torch.dtype) -> Tensor:
        """What whole sequences read, [batch, tokens, heads, value_size]; `computed` as of `RecurrencePlan.handed`."""
        return self.plan.run(steps, None, self.chunk, computed)[0]

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The effective weights [batch, heads, query, key] of the values in what each head reads.

        They may be negative and need not sum to one; norms and gates that follow are not in them.
        """
        return effective_weights(self.read(query, source, key_padding_mask)[0])

    def read(self, rows: Tensor, source: Tensor | None, key_padding_mask: Tensor | None) -> tuple[Steps, Tensor | None]:
        """The steps of whole sequences; raises `InvalidValue` where a source is given."""
        refuse_source(source)
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        return self._steps(rows, positions, key_padding_mask, None)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; returns [tokens, width].

        Reads and replaces the state "memory": "S" [requests, heads, key_size, value_size], float32, and with a
        convolution "tail" [requests, taps - 1, channels], its last inputs.
        """
        before = state["memory"].read()
        if batch.decoding:
            out, after = self._decode(query, batch, before["S"], before.get("tail"))
        else:
            out, after = self._prefill(query, batch, before["S"], before.get("tail"))
        state["memory"].write({name: part.to(before[name].dtype) for name, part in after.items()})
        return self.finish(out[None], query[None])[0]

    def _decode(
        self, rows: Tensor, batch: RaggedBatch, memory: Tensor, tail: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        steps, tail = self._steps(rows[:, None], batch.positions[:, None], None, tail)
        out, after = self.plan.decode(steps, memory.to(steps.value.dtype))
        return out[:, 0], _kept(after, tail)

    def _prefill(
        self, rows: Tensor, batch: RaggedBatch, memory: Tensor, tail: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        pieces, memories, tails = [], [], []
        for span in batch.spans():
            piece, request = slice(span.start, span.stop), slice(span.request, span.request + 1)
            mine = None if tail is None else tail[request]
            steps, mine = self._steps(rows[None, piece], batch.positions[None, piece], None, mine)
            held = memory[request].to(steps.value.dtype)
            if span.stop - span.start == 1:
                # As in a step of single tokens, so that company changes nothing.
                seen, after = self.plan.decode(steps, held)
            else:
                seen, after = self.plan.run(steps, held, self.chunk, multiplied_in(rows))
            pieces.append(seen[0])
            memories.append(after)
            tails.append(mine)
        left = None if tail is None else torch.cat(tails)  # type: ignore[arg-type]
        return torch.cat(pieces), _kept(torch.cat(memories), left)

    def _steps(
        self, rows: Tensor, positions: Tensor, key_padding_mask: Tensor | None, tail: Tensor | None
    ) -> tuple[Steps, Tensor | None]:
        query, key, value = self.query(rows), self.key(rows), self.value(rows)
        if self.convolution is not None:
            mixed = wide(torch.cat([query, key, value], dim=-1))
            mixed = mixed if key_padding_mask is None else torch.where(key_padding_mask[..., None], mixed, 0)
            mixed, tail = self.convolution(mixed, tail)
            query, key, value = mixed.split([query.shape[-1], key.shape[-1], value.shape[-1]], dim=-1)
        query, key, value = (by_heads(part, self.heads.query) for part in (query, key, value))
        return self.steps(Inputs(rows, query, key, value, positions)).kept(key_padding_mask), tail


def _kept(memory: Tensor, tail: Tensor | None) -> dict[str, Tensor]:
    return {"S": memory} if tail is None else {"S": memory, "tail": tail}
