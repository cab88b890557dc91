"""The layer of the neural Turing machine."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from attn_core import Heads, LayerState, RaggedBatch
from attn_core.kernels.base import batch_invariant
from attn_core.masking import wide
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

from attn_variants.attention.projections import refuse_source

EPSILON = 1e-8
LEAST = 1e-16
"""Added to weights before they are raised to a power, whose gradient takes their logarithm."""


def by_content(key: Tensor, memory: Tensor, strength: Tensor) -> Tensor:
    """w^c = softmax(β cos(k, M_i)) [..., heads, slots] (equations 5 and 6).

    `key` [..., heads, size], `memory` [..., slots, size], `strength` β [..., heads], at least 0.
    """
    lengths = torch.linalg.vector_norm(key, dim=-1)[..., None] * torch.linalg.vector_norm(memory, dim=-1)[..., None, :]
    cosines = (key @ memory.transpose(-1, -2)) / (lengths + EPSILON)
    return torch.softmax(strength[..., None] * cosines, dim=-1)


def interpolated(content: Tensor, before: Tensor, gate: Tensor) -> Tensor:
    """w^g = g w^c + (1 - g) w_{t-1} (equation 7); weights [..., heads, slots], `gate` [..., heads] from 0 to 1."""
    return gate[..., None] * content + (1 - gate[..., None]) * before


def shifted(weights: Tensor, shifts: Tensor) -> Tensor:
    """w̃(i) = Σ_o s(o) w(i - o), a circular convolution (equation 8).

    `shifts` s [..., heads, 2 r + 1] are the weights of the shifts -r to r.
    """
    reach = shifts.shape[-1] // 2
    moved = [torch.roll(weights, by, dims=-1) * shifts[..., by + reach, None] for by in range(-reach, reach + 1)]
    return torch.stack(moved).sum(0)


def sharpened(weights: Tensor, power: Tensor) -> Tensor:
    """w^γ / Σ w^γ (equation 9); `power` γ [..., heads], at least 1."""
    raised = (weights + LEAST) ** power[..., None]
    return raised / raised.sum(-1, keepdim=True)


class NtmState(NamedTuple):
    """The state of the machine: `memory` [batch, slots, size], the last `reading` and `writing` weights [batch, heads,
    slots], and the last `read` vectors [batch, heads, size]."""

    memory: Tensor
    reading: Tensor
    writing: Tensor
    read: Tensor


class NtmLayer(nn.Module):
    """A controller with equally many read and write heads on a memory of `slots` rows, which shift by up to `shift`.

    The controller's output is computed from the token's input and the last reads; from it, each head computes its
    addressing, erase and add vectors. Heads write before they read. Learned: `controller`, `interface` and `output`
    (`nn.Linear`) and `start` [slots, size], the memory of a new sequence. The memory, weights and reads are at least
    float32.
    """

    no_weight_decay: ClassVar[tuple[str, ...]] = ("start",)
    """Parameters of vectors, which are stored in two dimensions."""

    def __init__(self, heads: Heads, *, hidden_size: int, bias: bool, slots: int, shift: int) -> None:
        super().__init__()
        self.heads, self.size, self.slots = heads.query, heads.key_size, slots
        inner = self.heads * self.size
        # The sizes of the key, its strength, the gate, the shifts and the power.
        self.look = (self.size, 1, 1, 2 * shift + 1, 1)
        self.controller = nn.Linear(hidden_size + inner, inner)
        self.interface = nn.Linear(inner, self.heads * 2 * (sum(self.look) + self.size))
        self.output = nn.Linear(2 * inner, hidden_size, bias=bias)
        self.start = nn.Parameter(torch.randn(slots, self.size) * self.size**-0.5)

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Run over whole sequences [batch, token, hidden_size] -> [batch, token, hidden_size].

        A padded token, False in `key_padding_mask` [batch, token], does not change the state and feeds zeros to the
        output.
        """
        refuse_source(source)
        if query.shape[1] == 0:
            return query.clone()
        nothing = wide(query).new_zeros(query.shape[0], self.heads, self.slots)
        machine = self._started(nothing[:, 0, :, None].expand(-1, -1, self.size), nothing, nothing, self._unread(query))
        out, _ = self._run(query, machine, key_padding_mask)
        return self._out(out, query, key_padding_mask)

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Compute one engine step over the new rows [tokens, hidden_size] of many requests; returns the same shape.

        Replaces the state "machine", which stores differences from the initial memory and weights, so that a new state
        is zero.
        """
        held = {name: field.to(wide(query).dtype) for name, field in state["machine"].read().items()}
        machine = self._started(held["memory"], held["reading"], held["writing"], held["read"])
        if batch.decoding:
            out, machine = self._run(query[:, None], machine, None)
        else:
            runs = [
                self._run(
                    query[None, span.start : span.stop],
                    NtmState(*(field[span.request, None] for field in machine)),
                    None,
                )
                for span in batch.spans()
            ]
            out = torch.cat([rows.flatten(0, 1) for rows, _ in runs])
            machine = NtmState(*(torch.cat(fields) for fields in zip(*(after for _, after in runs), strict=True)))
        changed, kept = self._changed(machine)._asdict(), state["machine"].read()
        state["machine"].write({name: field.to(kept[name].dtype) for name, field in changed.items()})
        return self._out(out.flatten(0, -2), query, None)

    def _started(self, memory: Tensor, reading: Tensor, writing: Tensor, read: Tensor) -> NtmState:
        """Add the initial state, the learned memory with all heads at slot 0, to stored differences."""
        first = one_hot(torch.zeros_like(reading[..., 0], dtype=torch.int64), self.slots).to(reading.dtype)
        return NtmState(memory + self.start.to(memory.dtype), reading + first, writing + first, read)

    def _changed(self, machine: NtmState) -> NtmState:
        """The differences of a state from the initial one."""
        origin = self._started(*(torch.zeros_like(field) for field in machine))
        return NtmState(*(now - first for now, first in zip(machine, origin, strict=True)))

    def _unread(self, like: Tensor) -> Tensor:
        return wide(like).new_zeros(like.shape[0], self.heads, self.size)

    def _run(self, rows: Tensor, machine: NtmState, key_padding_mask: Tensor | None) -> tuple[Tensor, NtmState]:
        """Run over tokens in order: the controller outputs and reads, side by side, [batch, token, 2 heads size], and
        the state after them."""
        out = []
        for token in range(rows.shape[1]):
            if token and batch_invariant():  # rounded as where a step ends
                machine = self._started(*self._changed(machine))
            seen = torch.cat([rows[:, token], machine.read.flatten(1).to(rows.dtype)], dim=-1)
            control = torch.tanh(self.controller(seen))
            after = self._updated(control, machine)
            if key_padding_mask is not None:
                real = key_padding_mask[:, token, None, None]
                after = NtmState(*(torch.where(real, new, old) for new, old in zip(after, machine, strict=True)))
            machine = after
            out.append(torch.cat([wide(control), machine.read.flatten(1)], dim=-1))
        return torch.stack(out, dim=1), machine

    def _updated(self, control: Tensor, machine: NtmState) -> NtmState:
        """The state after the heads write and read, controlled by the controller's output [batch, heads size]."""
        parameters = torch.unflatten(wide(self.interface(control)), -1, (self.heads, -1))
        read, write, erase, add = torch.split(
            parameters, [sum(self.look), sum(self.look), self.size, self.size], dim=-1
        )
        writing = self._addressed(write, machine.memory, machine.writing)
        kept = 1 - writing[..., None] * torch.sigmoid(erase)[:, :, None]
        memory = machine.memory * kept.prod(1) + writing.transpose(1, 2) @ add
        reading = self._addressed(read, memory, machine.reading)
        return NtmState(memory, reading, writing, reading @ memory)

    def _addressed(self, parameters: Tensor, memory: Tensor, before: Tensor) -> Tensor:
        """The addressing weights [batch, heads, slots] of heads whose last weights were `before`."""
        key, strength, gate, shifts, power = torch.split(parameters, list(self.look), dim=-1)
        content = by_content(key, memory, softplus(strength[..., 0]))
        moved = shifted(interpolated(content, before, torch.sigmoid(gate[..., 0])), torch.softmax(shifts, dim=-1))
        return sharpened(moved, 1 + softplus(power[..., 0]))

    def _out(self, rows: Tensor, inputs: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        rows = rows.to(inputs.dtype)
        out: Tensor = self.output(rows if key_padding_mask is None else rows * key_padding_mask[..., None])
        return out
