"""Stacks of LSTMs over padded sequences, and one moment of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attn_core import Field
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attn_models.encoder_decoder.packed_stack import PackedStack

RANGE = 0.1
"""Weights are drawn uniformly from ± this (Luong et al. 2015, section 4.1; Sutskever et al. took 0.08)."""


def lstm_stack(inputs: int, width: int, layers: int, dropout: float) -> nn.LSTM:
    """`torch.nn.LSTM` over [batch, tokens, inputs], its weights as in the papers."""
    stack = nn.LSTM(inputs, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
    for weight in stack.parameters():
        nn.init.uniform_(weight, -RANGE, RANGE)
    return stack


def lstm_fields(width: int, layers: int) -> Mapping[str, Field]:
    """What a stack remembers: its hidden states and its cells."""
    return {"hidden": Field((layers, width)), "cell": Field((layers, width))}


def read_padded(stack: nn.Module, inputs: Tensor, lengths: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs [batch, source, ...] of padded inputs [batch, source, ...] and the last states, as if each were alone."""
    if isinstance(stack, PackedStack):
        rows, last = stack.read(inputs, lengths)
        return rows, last if isinstance(last, tuple) else (last,)
    packed = pack_padded_sequence(inputs, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    outputs, last = stack(packed)
    rows, _ = pad_packed_sequence(outputs, batch_first=True, total_length=inputs.shape[1])
    return rows, last if isinstance(last, tuple) else (last,)


def lstm_state(last: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The fields [batch, layers, width] of a stack's states [layers, batch, width]."""
    return {"hidden": last[0].transpose(0, 1), "cell": last[1].transpose(0, 1)}


def lstm_moment(
    stack: nn.LSTM | PackedStack, inputs: Tensor, held: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The last layer's outputs [batch, width] of inputs [batch, inputs], and the new fields."""
    last = tuple(held[name].transpose(0, 1).contiguous() for name in ("hidden", "cell"))
    outputs, fresh = stack(inputs[:, None], last)
    return outputs[:, 0], lstm_state(fresh)
