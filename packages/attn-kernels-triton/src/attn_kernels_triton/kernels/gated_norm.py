"""What becomes of the outputs of recurrences: division by a sum of weights, RMSNorm of heads and a gate."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of


class GatedNorm(NamedTuple):
    """How sums become outputs: rows of `size` elements, those of one or more heads, are a group [request, group, size].

    `weight` is [group · step + size], with the `step` from one group to the next, 0 where all have the same, or None;
    `gate` and `out` are the groups' rows, `NO_ROWS` for no gate. Constants: `size`, whether rows are `normed`, the
    activation of the `gate_form`, and whether `norm_first`.
    """

    weight: Any
    step: Any
    gate: Rows
    out: Rows
    eps: Any
    size: Any
    normed: Any
    gate_form: Any
    norm_first: Any


class Finish(NamedTuple):
    """Everything for the program that finishes sums, `total` [request, group, size], float32, behind which stands what
    they are divided by where `normalizer_eps`, which is added to it, is not None. `width` is a power of two not smaller
    than the size."""

    total: Rows
    normalizer_eps: Any
    output: GatedNorm
    groups: Any
    width: Any


@triton.jit
def finish_rows(call):
    """Grid: groups of heads of requests."""
    request, group = tl.program_id(0) // call.groups, tl.program_id(0) % call.groups
    columns = tl.arange(0, call.width)
    start = start_of(call.total, request, group)
    total = tl.load(start + columns, mask=columns < call.output.size, other=0.0)
    if call.normalizer_eps is not None:
        total /= tl.load(start + call.output.size) + call.normalizer_eps
    write_output(call.output, total, request, group, columns)


@triton.jit
def write_output(output, total, request, group, columns):
    """Write sums [columns], zero behind the size, as outputs of a group; all of its columns where they are normed."""
    inside = columns < output.size
    gate = gate_of(output, request, group, columns)
    if not output.norm_first:
        total *= gate
    if output.normed:
        total *= tl.rsqrt(tl.sum(total * total, 0) / output.size + output.eps)
    if output.weight is not None:
        total *= tl.load(output.weight + group * output.step + columns, mask=inside, other=0.0).to(tl.float32)
    if output.norm_first:
        total *= gate
    at = start_of(output.out, request, group) + columns
    tl.store(at, total.to(output.out.data.dtype.element_ty), mask=inside)


@triton.jit
def gate_of(output, request, group, columns):
    """What outputs are multiplied by."""
    found = tl.zeros_like(columns).to(tl.float32) + 1.0
    if output.gate.data is not None:
        at = start_of(output.gate, request, group) + columns
        rows = tl.load(at, mask=columns < output.size, other=0.0).to(tl.float32)
        found = tl.sigmoid(rows)
        if output.gate_form == "silu":
            found *= rows
    return found
