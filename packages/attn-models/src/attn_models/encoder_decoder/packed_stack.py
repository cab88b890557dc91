"""Recurrent stacks whose matrices are packed for serving: one product of all inputs, then one of the state a moment."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from attn_core.kernels.linear import Pack
from torch import Tensor, nn

from attn_models.packing.views import linear_of

State = tuple[Tensor, ...]
"""What a layer remembers, [batch, width] each; what it gives out comes first."""


class PackedStack(nn.Module):
    """What `torch.nn.LSTM` or `torch.nn.GRU` computes of [batch, tokens, inputs] without dropout, by packed matrices.

    Each sequence gets the same bits alone and in a crowd, as long as the packed layers promise it: gates are computed
    row by row, and no row of states lies right behind another where a function is not exact.
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
        """What is added to the products of inputs and of the state."""

    @abstractmethod
    def advance(self, entering: Tensor, carried: Tensor, state: State) -> State:
        """The next state, from products of the input and of the state [batch, gates * width], which may be changed."""

    @abstractmethod
    def begin(self, example: Tensor, batch: int) -> State:
        """The first state of a layer: zeros, of the example's type."""

    def forward(self, inputs: Tensor, last: Any = None) -> tuple[Tensor, Any]:
        """Outputs [batch, tokens, directions * width] and last states, as torch's module gives them."""
        return self.read(inputs, [inputs.shape[1]] * len(inputs), last)

    def read(self, inputs: Tensor, lengths: Sequence[int], last: Any = None) -> tuple[Tensor, Any]:
        """The same of padded sequences of these lengths, each as if it were alone; padding gives zeros."""
        given = (last,) if isinstance(last, Tensor) else last
        ends: list[State] = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                place = layer * self.directions + direction
                state = self.begin(inputs, len(inputs)) if given is None else tuple(each[place] for each in given)
                rows, end = self._pass(place, inputs, lengths, state)
                outputs.append(rows)
                ends.append(end)
            inputs = torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
        fields = tuple(torch.stack(each) for each in zip(*ends, strict=True))
        return inputs, fields if len(fields) > 1 else fields[0]

    def _pass(self, place: int, inputs: Tensor, lengths: Sequence[int], state: State) -> tuple[Tensor, State]:
        """One direction of one layer."""
        entering = self.inward[place](inputs)
        moments = range(inputs.shape[1])
        shortest = min(lengths, default=0)
        counts = torch.tensor(lengths)[:, None]
        rows: list[Tensor] = [entering] * len(moments)
        for moment in moments if place % self.directions == 0 else reversed(moments):
            fresh = self.advance(entering[:, moment], self.recurrent[place](state[0]), state)
            if moment >= shortest:
                there = counts > moment
                rows[moment] = fresh[0] * there
                state = tuple(torch.where(there, new, old) for new, old in zip(fresh, state, strict=True))
            else:
                rows[moment], state = fresh[0], fresh
        return torch.stack(rows, dim=1), state


class PackedLstm(PackedStack):
    """i, f, o = σ(W x + U h + b), g = tanh(W x + U h + b); c' = f ∘ c + i ∘ g, h' = o ∘ tanh(c'); gates i, f, g, o."""

    def biases(self, inward: Tensor, recurrent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Both with the inputs."""
        return inward.float() + recurrent.float(), None

    def begin(self, example: Tensor, batch: int) -> State:
        """h and c."""
        return example.new_zeros(batch, self.width), example.new_zeros(batch, self.width)

    def advance(self, entering: Tensor, carried: Tensor, state: State) -> State:
        """h' and c'."""
        write, keep, new, show = carried.add_(entering).chunk(4, dim=-1)
        # c' takes the place of a gate, so that its rows lie apart as well.
        cell = keep.sigmoid_().mul_(state[1]).add_(write.sigmoid_().mul_(new.tanh_()))
        return show.sigmoid_() * cell.tanh(), cell


class PackedGru(PackedStack):
    """r, z = σ(W x + U h + b); n = tanh(W x + b + r ∘ (U h + b)); h' = (1 - z) ∘ n + z ∘ h; gates r, z, n."""

    def biases(self, inward: Tensor, recurrent: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Each with its own product: the reset gate acts on one of them."""
        return inward, recurrent

    def begin(self, example: Tensor, batch: int) -> State:
        """h."""
        return (example.new_zeros(batch, self.width),)

    def advance(self, entering: Tensor, carried: Tensor, state: State) -> State:
        """h'."""
        gates, new = carried[:, : 2 * self.width], carried[:, 2 * self.width :]
        reset, kept = gates.add_(entering[:, : 2 * self.width]).sigmoid_().chunk(2, dim=-1)
        new.mul_(reset).add_(entering[:, 2 * self.width :]).tanh_()
        return ((state[0] - new).mul_(kept).add_(new),)


def packed_stack(stack: nn.LSTM | nn.GRU, pack: Pack) -> PackedStack:
    """The stack with packed matrices."""
    return (PackedLstm if isinstance(stack, nn.LSTM) else PackedGru)(stack, pack)
