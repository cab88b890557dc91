"""Functions applied before the update of a state: features of queries and keys, decays and step sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of


class DecayRows(NamedTuple):
    """The inputs of the log decays: `rows` [request, head, channel or 1], with a request stride of 0 if they are the
    same for all; `rate` [head] and `bias` [head, channel or 1], contiguous, for the form "softplus", else None;
    `temperature` divides those of "log_sigmoid". Constants: the `form`, see
    `attn_core.kernels.recurrent_step.DecayForm`, and whether decays are per channel (`channels`). All fields are None
    without decay."""

    rows: Rows
    rate: Any
    bias: Any
    temperature: Any
    form: Any
    channels: Any


UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def log1p(x):
    """ln(1 + x) for x from 0 to 1, by the series of 2 artanh(x / (2 + x)).

    The hardware logarithm is inexact near 1, where its error would be as large as a small step size.
    """
    part = x / (2.0 + x)
    square = part * part
    series = 1.0 / 11 + square / 13
    series = 1.0 / 7 + square * (1.0 / 9 + square * series)
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * series))
    return 2.0 * part * series


@triton.jit
def softplus(rows):
    """ln(1 + e^x)."""
    return tl.maximum(rows, 0.0) + log1p(tl.exp(-tl.abs(rows)))


@triton.jit
def silu(rows):
    """x σ(x)."""
    return rows * tl.sigmoid(rows)


@triton.jit
def elu_plus_one(rows, inside):
    """elu(x) + 1, which is positive for all x, where `inside`, else zero."""
    return tl.where(inside, tl.exp(tl.minimum(rows, 0.0)) + tl.maximum(rows, 0.0), 0.0)


@triton.jit
def unit(rows):
    """The row normalized to unit length."""
    return rows * tl.rsqrt(tl.sum(rows * rows, 0) + UNIT_EPS)


@triton.jit
def step_size_of(decay, request, head):
    """The step size softplus(x + bias) of a head with one decay."""
    rows = tl.load(start_of(decay.rows, request, head)).to(tl.float32)
    return softplus(rows + tl.load(decay.bias + head).to(tl.float32))


@triton.jit
def decay_factor_of(decay, request, head, columns, size: tl.constexpr):
    """The decay factor e^g of a token, [columns] if decays are per channel, else a scalar."""
    start = start_of(decay.rows, request, head)
    if decay.channels:
        inside = columns < size
        rows = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        rows = tl.load(start).to(tl.float32)
    found = rows
    if decay.form == "log_sigmoid":
        found = (tl.minimum(rows, 0.0) - log1p(tl.exp(-tl.abs(rows)))) / decay.temperature
    elif decay.form == "softplus":
        if decay.channels:
            bias = tl.load(decay.bias + head * size + columns, mask=columns < size, other=0.0).to(tl.float32)
        else:
            bias = tl.load(decay.bias + head).to(tl.float32)
        found = -tl.exp(tl.load(decay.rate + head).to(tl.float32)) * softplus(rows + bias)
    return tl.exp(found)
