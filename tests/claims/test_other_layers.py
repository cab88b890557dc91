"""CL-54: the rows of the table that are not attention, counted by torch: recurrent layers and convolutions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

LENGTHS, WIDTHS, TAPS = (2**4, 2**5, 2**6), (8, 16, 32), (2, 4, 8)


def recurrent(length: int, width: int, taps: int) -> int:
    """FLOPs of an LSTM over a sequence, cell by cell; it has no taps."""
    cell, state = nn.LSTMCell(width, width, bias=False), (torch.zeros(1, width), torch.zeros(1, width))
    with FlopCounterMode(display=False) as counter:
        for row in torch.randn(length, 1, width):
            state = cell(row, state)
    return int(counter.get_total_flops())


def convolution(length: int, width: int, taps: int) -> int:
    """FLOPs of a convolution over a sequence."""
    layer = nn.Conv1d(width, width, taps, bias=False)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, width, length + taps - 1))
    return int(counter.get_total_flops())


def exponent(sizes: Sequence[int], prices: Sequence[int]) -> float:
    """The power of the size that fits the prices best."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(p) for p in prices]).slope


@pytest.mark.parametrize(("layer", "by_taps"), [(recurrent, 0), (convolution, 1)])
def test_cl_54_recurrent_layers_cost_n_d_squared_and_convolutions_k_times_as_much(
    layer: Callable[[int, int, int], int], by_taps: int
) -> None:
    assert exponent(LENGTHS, [layer(length, 8, 2) for length in LENGTHS]) == pytest.approx(1)
    assert exponent(WIDTHS, [layer(16, width, 2) for width in WIDTHS]) == pytest.approx(2)
    assert exponent(TAPS, [layer(16, 8, taps) for taps in TAPS]) == pytest.approx(by_taps, abs=1e-9)
