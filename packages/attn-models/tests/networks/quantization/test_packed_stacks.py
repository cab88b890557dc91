"""Recurrent stacks with packed matrices, against torch's own modules."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.kernels.linear import LinearProblem
from attn_models.recurrent.cells import encode_padded, lstm_fields, lstm_step, prepack_rnn
from torch import nn

KERNELS = ["cpu_float32", "amx_bfloat16", "amx_int8"]
STACKS = {
    "an LSTM": lambda width: nn.LSTM(32, width, batch_first=True),
    "three LSTMs": lambda width: nn.LSTM(32, width, 3, batch_first=True),
    "GRUs of both directions": lambda width: nn.GRU(32, width, 2, batch_first=True, bidirectional=True),
}
LENGTHS = [5, 9, 1, 9, 2]


def built(name, width=24, scale=0.4):
    torch.manual_seed(1)
    stack = STACKS[name](width).eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.uniform_(-scale, scale)
    return stack


def packed(stack, kernel="cpu_float32"):
    chosen = installed().linears.get(kernel)
    problem = LinearProblem(weights=chosen.weights, inputs=32, outputs=32, dtype=chosen.weights)
    if reason := chosen.available() or "; ".join(chosen.refusals(problem)):
        pytest.skip(reason)
    return prepack_rnn(stack, lambda layers: chosen.pack(layers[0].weight, layers[0].bias))


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9]])
def test_padded_sequences_give_what_torch_gives_each_of_them(name, lengths):
    stack, rows = built(name), torch.randn(len(lengths), 9, 32)
    with torch.no_grad():
        expected, last = encode_padded(stack, rows, lengths)
        found, ends = encode_padded(packed(stack), rows, lengths)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert len(ends) == len(last)
    for one, other in zip(ends, last, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["an LSTM", "three LSTMs"])
def test_a_sequence_in_pieces_and_moment_by_moment_gives_what_torch_gives_at_once(name):
    stack, rows = built(name), torch.randn(3, 7, 32)
    ours = packed(stack)
    with torch.no_grad():
        expected, last = stack(rows)
        first, held = ours(rows[:, :4])
        outputs = [first]
        fields = dict(zip(lstm_fields(24, 1), (each.transpose(0, 1) for each in held), strict=True))
        for moment in range(4, 7):
            out, fields = lstm_step(ours, rows[:, moment], fields)
            outputs.append(out[:, None])
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fields["cell"].transpose(0, 1), last[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [7, 24, 64, 100])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", STACKS)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_crowd(name, kernel, width):
    """Whatever the width: functions of gates must not depend on where in memory a row lies."""
    ours = packed(built(name, width), kernel)
    rows = torch.randn(40, 6, 32)
    lengths = [1 + i % 6 for i in range(40)]
    with torch.no_grad():
        together, last = encode_padded(ours, rows, lengths)
        for i in (0, 1, 17, 39):
            alone, ends = encode_padded(ours, rows[i : i + 1, : lengths[i]], lengths[i : i + 1])
            assert torch.equal(alone[0], together[i, : lengths[i]])
            assert all(torch.equal(one[:, 0], many[:, i]) for one, many in zip(ends, last, strict=True))


def test_a_sequence_in_pieces_gets_the_same_bits():
    ours, rows = packed(built("three LSTMs", 40)), torch.randn(2, 9, 32)
    with torch.no_grad():
        whole, last = ours(rows)
        first, held = ours(rows[:, :5])
        rest, ends = ours(rows[:, 5:], held)
    assert torch.equal(torch.cat([first, rest], dim=1), whole)
    assert all(torch.equal(one, other) for one, other in zip(ends, last, strict=True))
