"""CL-54: the rows of the table that are not attention, in the models that have them: LSTMs and convolutions.

An LSTM over a source of n tokens costs 16 n d² (four gates, from input and state, two operations each); a convolution
of 3 by 3 over n cells 18 n d².
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import pytest
import torch
from attn_models.encoder_decoder.config import BottleneckConfig, ShowAttendTellConfig
from attn_models.encoder_decoder.recurrent import RecurrentModel
from attn_models.encoder_decoder.show_attend_tell import ShowAttendTell
from attn_models.encoder_decoder.translation import Bottleneck
from torch.utils.flop_counter import FlopCounterMode

LENGTHS, WIDTHS = (2**4, 2**6, 2**8), (8, 16, 32)


def read(model: RecurrentModel, length: int) -> int:
    """FLOPs of reading one source."""
    # oneDNN's LSTM is one operation, of which torch counts nothing.
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        model.read(torch.ones(1, length, dtype=torch.int64), [length])
    return int(counter.get_total_flops())


def recurrent(length: int, width: int) -> int:
    """FLOPs of reading a source of `length` tokens by an LSTM of `width` units."""
    config = BottleneckConfig(
        vocab_size=11, max_seq_len=8, max_encoder_len=length, hidden_size=width, embedding=width, num_layers=1
    )
    return read(Bottleneck(config), length)


def convolution(length: int, width: int) -> int:
    """FLOPs of reading a grid of `length` cells by one convolution, less what its first state costs."""
    side = math.isqrt(length)
    config = ShowAttendTellConfig(
        vocab_size=11,
        max_seq_len=8,
        max_encoder_len=length + 1,
        hidden_size=width,
        rows=side,
        columns=side,
        features=width,
        embedding=width,
        convolutions=1,
    )
    return read(ShowAttendTell(config), length) - 4 * width**2


def exponent(sizes: Sequence[int], prices: Sequence[int]) -> float:
    """The power of the size that fits the prices best."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(p) for p in prices]).slope


@pytest.mark.parametrize(("layer", "factor"), [(recurrent, 16), (convolution, 18)])
def test_cl_54_recurrent_layers_cost_n_d_squared_and_convolutions_k_times_as_much(
    layer: Callable[[int, int], int], factor: int
) -> None:
    assert layer(64, 8) == factor * 64 * 8**2
    assert exponent(LENGTHS, [layer(length, 8) for length in LENGTHS]) == pytest.approx(1)
    assert exponent(WIDTHS, [layer(16, width) for width in WIDTHS]) == pytest.approx(2)
