"""Recurrent layers: LSTM stacks, the gated unit of RNNsearch, and stacks with prepacked matrices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attn_core import Field
from attn_core.kernels.linear import Pack
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attn_models.quantization.modules import linear_of

State = tuple[Tensor, ...]
"""The state of a layer, tensors [batch, width]; the first is its output."""


class PrepackedRnn(nn.Module):
    """Computes `torch.nn.LSTM` or `torch.nn.GRU` on [batch, tokens, inputs], without dropout, with packed matrices.

    The result for a sequence does not depend, bit for bit, on the others of the batch, if that holds for the packed
    layers: gates are computed row by row, and inexact functions are applied to tensors whose rows are not adjacent in
    memory, so that vectorised loops do not cross rows.
    """

    def __init__(self, stack: nn.RNNBase, pack: Pack) -> None:
        super().__init__()
        self.width, self.layers = stack.hidden_size, stack.num_layers
        self.directions = 2 if stack.bidirectional else 1
        names = [f"l{layer}{turn}" for layer in range(self.layers) for turn in ("", "_reverse")[: self.directions]]
        self.inward, self.recurrent = nn.ModuleList(), nn.ModuleList()
        for name in names:
            weights = [getattr(stack, f"weight_{kind}_{name}") for kind in ("ih", "hh")]
            biases = self.biases(*(getattr(stack, f"bias_{kind}_{name}") for kind in ("ih", "hh")))
            for packed, weight, bias in zip((self.inward, self.recurrent), weights, biases, strict=True):
                packed.append(pack([linear_of(weight, bias)]))

    @abstractmethod
    def biases(self, inward: Tensor, recurrent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The biases to add to the product with the inputs, and to that with the state."""

    @abstractmethod
    def advance(self, entering: Tensor, carried: Tensor, state: State) -> State:
        """The next state, from the products of input and state [batch, gates * width]; may overwrite `carried`."""

    @abstractmethod
    def begin(self, example: Tensor, batch: int) -> State:
        """The initial state of a layer: zeros, with the dtype and device of `example`."""

    def forward(self, inputs: Tensor, last: Any = None) -> tuple[Tensor, Any]:
        """Outputs [batch, tokens, directions * width] and last states, in the form of torch's modules."""
        return self.read(inputs, [inputs.shape[1]] * len(inputs), last)

    def read(self, inputs: Tensor, lengths: Sequence[int], last: Any = None) -> tuple[Tensor, Any]:
        """Like `forward`, for padded sequences of these lengths, each as if it were alone; outputs at padding are 0."""
        given = (last,) if isinstance(last, Tensor) else last
        ends: list[State] = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                state = self.begin(inputs, len(inputs)) if given is None else tuple(each[index] for each in given)
                rows, end = self._pass(index, inputs, lengths, state)
                outputs.append(rows)
                ends.append(end)
            inputs = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
        fields = tuple(torch.stack(each) for each in zip(*ends, strict=True))
        return inputs, fields if len(fields) > 1 else fields[0]

    def _pass(self, index: int, inputs: Tensor, lengths: Sequence[int], state: State) -> tuple[Tensor, State]:
        """Compute one direction of one layer: its outputs [batch, tokens, width] and its last state."""
        entering = self.inward[index](inputs)
        moments = range(inputs.shape[1])
        shortest = min(lengths, default=0)
        counts = torch.tensor(lengths, device=inputs.device)[:, None]
        rows: list[Tensor] = [entering] * len(moments)
        for moment in moments if index % self.directions == 0 else reversed(moments):
            fresh = self.advance(entering[:, moment], self.recurrent[index](state[0]), state)
            if moment >= shortest:
                present = counts > moment
                rows[moment] = fresh[0] * present
                state = tuple(torch.where(present, new, old) for new, old in zip(fresh, state, strict=True))
            else:
                rows[moment], state = fresh[0], fresh
        return torch.stack(rows, dim=1), state


class PrepackedLstm(PrepackedRnn):
    """i, f, o = σ(W x + U h + b), g = tanh(W x + U h + b); c' = f ∘ c + i ∘ g, h' = o ∘ tanh(c'); gates i, f, g, o."""

    def biases(self, inward: Tensor, recurrent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The sum of both, added to the product with the inputs."""
        return inward.float() + recurrent.float(), None

    def begin(self, example: Tensor, batch: int) -> State:
        """The initial h and c."""
        return example.new_zeros(batch, self.width), example.new_zeros(batch, self.width)

    def advance(self, entering: Tensor, carried: Tensor, state: State) -> State:
        """The next state h' and c'."""
        write, keep, new, show = carried.add_(entering).chunk(4, dim=-1)
        # c' is written over a gate, so that its rows are not adjacent in memory either.
        cell = keep.sigmoid_().mul_(state[1]).add_(write.sigmoid_().mul_(new.tanh_()))
        return show.sigmoid_() * cell.tanh(), cell


class PrepackedGru(PrepackedRnn):
    """r, z = σ(W x + U h + b); n = tanh(W x + b + r ∘ (U h + b)); h' = (1 - z) ∘ n + z ∘ h; gates r, z, n."""

    def biases(self, inward: Tensor, recurrent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Both, each for its own product, because the reset gate only acts on that with the state."""
        return inward, recurrent

    def begin(self, example: Tensor, batch: int) -> State:
        """The initial h."""
        return (example.new_zeros(batch, self.width),)

    def advance(self, entering: Tensor, carried: Tensor, state: State) -> State:
        """The next state h'."""
        gates, new = carried[:, : 2 * self.width], carried[:, 2 * self.width :]
        reset, kept = gates.add_(entering[:, : 2 * self.width]).sigmoid_().chunk(2, dim=-1)
        new.mul_(reset).add_(entering[:, 2 * self.width :]).tanh_()
        return ((state[0] - new).mul_(kept).add_(new),)


def prepack_rnn(stack: nn.LSTM | nn.GRU, pack: Pack) -> PrepackedRnn:
    """The same LSTM or GRU stack with packed matrices."""
    return (PrepackedLstm if isinstance(stack, nn.LSTM) else PrepackedGru)(stack, pack)


RANGE = 0.1
"""Initial weights are uniform between -`RANGE` and `RANGE` (Luong et al. 2015, section 4.1; Sutskever et al. used
0.08)."""


def lstm_stack(inputs: int, width: int, layers: int, dropout: float) -> nn.LSTM:
    """A `torch.nn.LSTM` over [batch, tokens, inputs], with its weights initialised as in the papers (`RANGE`)."""
    stack = nn.LSTM(inputs, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
    for weight in stack.parameters():
        nn.init.uniform_(weight, -RANGE, RANGE)
    return stack


def lstm_fields(width: int, layers: int) -> Mapping[str, Field]:
    """The state fields of an LSTM stack: hidden states and cells, [layers, width] each."""
    return {"hidden": Field((layers, width)), "cell": Field((layers, width))}


def encode_padded(stack: nn.Module, inputs: Tensor, lengths: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs [batch, source, ...] of a stack for padded `inputs` [batch, source, ...], and the last states; each
    sequence is computed as if it were alone."""
    if isinstance(stack, PrepackedRnn):
        rows, last = stack.read(inputs, lengths)
        return rows, last if isinstance(last, tuple) else (last,)
    packed = pack_padded_sequence(inputs, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    outputs, last = stack(packed)
    rows, _ = pad_packed_sequence(outputs, batch_first=True, total_length=inputs.shape[1])
    return rows, last if isinstance(last, tuple) else (last,)


def lstm_state(last: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The fields of `lstm_fields` [batch, layers, width] from the states of a stack [layers, batch, width]."""
    return {"hidden": last[0].transpose(0, 1), "cell": last[1].transpose(0, 1)}


def lstm_step(
    stack: nn.LSTM | PrepackedRnn, inputs: Tensor, held: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One time step of an LSTM stack: the outputs [batch, width] for `inputs` [batch, inputs], and the new fields."""
    last = tuple(held[name].transpose(0, 1).contiguous() for name in ("hidden", "cell"))
    outputs, fresh = stack(inputs[:, None], last)
    return outputs[:, 0], lstm_state(fresh)


class GatedCell(nn.Module):
    """z, r = σ(W x + U s + C c); s̃ = tanh(W x + U (r ∘ s) + C c); s' = (1 - z) ∘ s + z ∘ s̃.

    Bahdanau et al. 2015, appendix A.2.2. U is initialised orthogonal as in the paper; the reset gate is applied before
    U, in `torch.nn.GRUCell` after it.
    """

    def __init__(self, inputs: int, context: int, width: int) -> None:
        super().__init__()
        # Any: packed modules after `pack`.
        self.inward: Any = nn.Linear(inputs, 3 * width)
        self.shown: Any = nn.Linear(context, 3 * width, bias=False)
        self.gates: Any = nn.Linear(width, 2 * width, bias=False)
        self.candidate: Any = nn.Linear(width, width, bias=False)
        for part in (*self.gates.weight.chunk(2), self.candidate.weight):
            nn.init.orthogonal_(part)

    def pack(self, pack: Pack) -> None:
        """Prepack or quantize the matrices for inference."""
        self.inward, self.shown = pack([self.inward]), pack([self.shown])
        self.gates, self.candidate = pack([self.gates]), pack([self.candidate])

    def forward(self, inputs: Tensor, state: Tensor, context: Tensor) -> Tensor:
        """The next state [batch, width]."""
        update, reset, fresh = (self.inward(inputs) + self.shown(context)).chunk(3, dim=-1)
        update_state, reset_state = self.gates(state).chunk(2, dim=-1)
        kept = torch.sigmoid(reset + reset_state) * state
        proposed = torch.tanh(fresh + self.candidate(kept))
        return torch.lerp(state, proposed, torch.sigmoid(update + update_state))
