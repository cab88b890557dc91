"""The epilogue of linear recurrences: division by a sum of weights (normalizer), RMSNorm of heads and a gate."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attn_kernels_triton.kernels.arguments import Rows
from attn_kernels_triton.kernels.common import start_of


class GatedNorm(NamedTuple):
    """The parameters of the epilogue, over groups [request, group, size] of one or more heads that are normalized
    together.

    `weight` is that of the norm, or None, at offset group · `step` (0 if all groups share it); `gate` and `out` are
    rows of the groups, `NO_ROWS` for no gate. Constants: `size`, whether rows are `normed`, the activation of the gate
    (`gate_form`), and whether the norm comes before the gate (`norm_first`).
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
    """The argument of the epilogue kernel over sums `total` [request, group, size], float32.

    If `normalizer_eps` is not None, the element behind the sums of a group plus this epsilon is their divisor. `width`
    is a power of two that is not smaller than the size.
    """

    total: Rows
    normalizer_eps: Any
    output: GatedNorm
    groups: Any
    width: Any


@triton.jit
def finish_rows(call):
    """Apply the epilogue to one group. Grid: groups of heads, for each request."""
    request, group = tl.program_id(0) // call.groups, tl.program_id(0) % call.groups
    columns = tl.arange(0, call.width)
    start = start_of(call.total, request, group)
    total = tl.load(start + columns, mask=columns < call.output.size, other=0.0)
    if call.normalizer_eps is not None:
        total /= tl.load(start + call.output.size) + call.normalizer_eps
    write_output(call.output, total, request, group, columns)


@triton.jit
def write_output(output, total, request, group, columns):
    """Apply norm and gate to the sums [columns] of a group, zero behind its size, and write the output.

    If rows are normalized, `columns` must be all columns of the group.
    """
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
    """The activated gate by which outputs are multiplied, 1 without a gate."""
    found = tl.zeros_like(columns).to(tl.float32) + 1.0
    if output.gate.data is not None:
        at = start_of(output.gate, request, group) + columns
        rows = tl.load(at, mask=columns < output.size, other=0.0).to(tl.float32)
        found = tl.sigmoid(rows)
        if output.gate_form == "silu":
            found *= rows
    return found
