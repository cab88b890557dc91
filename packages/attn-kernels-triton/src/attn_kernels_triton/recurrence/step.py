"""Decode steps of linear recurrences over states in slots: how they are divided into kernels, and their launches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl
from attn_core.batch import SlotsInPlace
from attn_core.kernels.recurrent_step import ConvolutionInputs, DecayInputs, RecurrentStepInputs, RecurrentStepSpec
from torch import Tensor

from attn_kernels_triton.kernels.arguments import NO_ROWS, Rows
from attn_kernels_triton.kernels.gated_norm import Finish, GatedNorm, finish_rows
from attn_kernels_triton.kernels.recurrent_gates import DecayRows
from attn_kernels_triton.kernels.recurrent_step import Step, StepRotary, StepTile, step_heads
from attn_kernels_triton.kernels.short_convolution import Convolution, Convolve, convolve_rows
from attn_kernels_triton.launch import Launch, power_of_two
from attn_kernels_triton.recurrence.step_checks import check_step
from attn_kernels_triton.rowwise.rows import norm_tile, power

WHOLE = 128 * 128
"""The largest number of state elements per program: 64 registers of each thread of eight warps."""
UNEVEN = 64 * 128
"""The same for states with a sum of keys, whose rows have odd lengths, so that each element needs its own address."""
PART = 32 * 128
"""The number of state elements per program if nothing requires whole states, so that more programs share the reads."""
BLOCK = 256
"""The number of channels that a program convolves."""

NO_CONVOLUTION = Convolution(None, None, NO_ROWS, None, None, None, None, None)
NO_ROTARY = StepRotary(None, None, None, None, None)
NO_DECAY = DecayRows(NO_ROWS, None, None, None, None, None)


class StepPlan(NamedTuple):
    """How a step is divided into kernels: whether a separate one `convolves` before the kernel that updates states, and
    one `finishes` after it; the `columns` of a state per program of the latter, and its warps."""

    convolves: bool
    finishes: bool
    columns: int
    warps: int


def plan_of(spec: RecurrentStepSpec) -> StepPlan:
    """The division into the fewest kernels.

    The kernel that updates states convolves its inputs itself, if programs hold whole states and heads share no queries
    and keys, and normalizes its outputs itself, if programs hold whole states and heads are not normalized together.
    States that are too large for that, or for which it saves no kernel, are divided among programs.
    """
    key_width, value_width = power_of_two(spec.key_size), power_of_two(spec.value_size)
    fits = key_width * value_width <= (UNEVEN if spec.normalizer else WHOLE)
    convolved_within = spec.taps > 0 and fits and spec.num_heads == spec.num_key_heads
    reduced = spec.norm_heads > 0 or spec.normalizer
    reduced_within = reduced and fits and spec.norm_heads <= 1
    whole = convolved_within or reduced_within
    columns = value_width if whole else min(value_width, max(16, PART // key_width))
    return StepPlan(
        convolves=spec.taps > 0 and not convolved_within,
        finishes=reduced and not reduced_within,
        columns=columns,
        warps=8 if key_width * columns > PART else 4,
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_step(inputs: RecurrentStepInputs) -> Tensor:
    """See `attn_core.kernels.recurrent_step.RecurrentStepKernel.run`; raises `InvalidValue`, see `step_checks`."""
    check_step(inputs)
    spec, requests = inputs.spec, inputs.value.shape[0]
    out = torch.empty(requests, spec.num_heads * spec.value_size, dtype=inputs.value.dtype, device=inputs.value.device)
    if requests:
        try_programs(inputs, out)
        for launch in step_launches(inputs, out):
            launch.run(out.device)
    return out


_tried: set[Hashable] = set()


def try_programs(inputs: RecurrentStepInputs, out: Tensor) -> None:
    """Run the kernels once, for the first step of a kind, over copies of the states of one slot.

    If a step takes several kernels, one that this GPU cannot run thus fails before any state has been changed.
    """
    state = inputs.state.fields.items()
    kind = inputs.spec, inputs.value.dtype, *(field.dtype for _, field in state), out.device
    if kind in _tried:
        return
    copies = {name: field[:1].clone() for name, field in state}
    tried = replace(inputs, state=SlotsInPlace(copies, torch.zeros_like(inputs.state.slots)))
    launches = step_launches(tried, torch.empty_like(out))
    if len(launches) > 1:
        for launch in launches:
            launch.run(out.device)
    _tried.add(kind)


def step_launches(inputs: RecurrentStepInputs, out: Tensor) -> list[Launch]:
    """The launches of a step in order; `out` is [requests, num_heads * value_size]."""
    spec, plan, launches = inputs.spec, plan_of(inputs.spec), []
    convolution = NO_CONVOLUTION
    if inputs.convolution is not None:
        convolution = convolution_of(inputs.convolution, inputs.state.fields.get("tail"))
        if plan.convolves:
            mixed = torch.empty(out.shape[0], spec.channels, dtype=torch.float32, device=out.device)
            launches.append(convolve_launch(inputs, convolution, mixed))
            inputs, convolution = convolved_inputs(inputs, inputs.convolution.starts, mixed), NO_CONVOLUTION
    total = None
    if plan.finishes:
        total = torch.empty(out.shape[0], spec.num_heads, spec.columns, dtype=torch.float32, device=out.device)
    output = output_of(inputs, out)
    launches.append(step_launch(inputs, convolution, total, output))
    if total is not None:
        launches.append(finish_launch(inputs, total, output))
    return launches


def step_launch(
    inputs: RecurrentStepInputs, convolution: Convolution, total: Tensor | None, output: GatedNorm
) -> Launch:
    """The launch of the kernel that updates the states; it writes its sums to `total`, or the output if that is
    None."""
    spec, plan, state = inputs.spec, plan_of(inputs.spec), inputs.state.fields["S"]
    slot, head, channel, _ = state.stride()
    call = Step(
        query=by_head(inputs.query),
        key=by_head(inputs.key),
        value=by_head(inputs.value),
        state=Rows(state, slot, tl.constexpr(channel), head),
        slots=inputs.state.slots,
        convolution=convolution,
        rotary=rotary_of(inputs),
        decay=NO_DECAY if inputs.decay is None else decay_of(spec, inputs.decay),
        strength=inputs.strength,
        strength_row=None if inputs.strength is None else inputs.strength.stride(0),
        skip=inputs.output.skip,
        query_scale=inputs.scales[0],
        key_scale=inputs.scales[1],
        normalizer_eps=inputs.output.normalizer_eps if spec.normalizer else None,
        total=NO_ROWS if total is None else by_head(total),
        output=output,
        heads=spec.num_heads,
        tile=tile_of(spec, plan),
    )
    programs = inputs.value.shape[0] * spec.num_heads * call.tile.parts.value
    return Launch(program=step_heads, programs=programs, call=call, warps=plan.warps, stages=1)


def tile_of(spec: RecurrentStepSpec, plan: StepPlan) -> StepTile:
    """The compile-time constants of the kernel that updates states."""
    constants = {
        "key_size": spec.key_size,
        "value_size": spec.value_size,
        "key_width": power_of_two(spec.key_size),
        "columns": plan.columns,
        "parts": -(-spec.value_size // plan.columns),
        "heads_per_key": spec.num_heads // spec.num_key_heads,
        "feature_map": spec.feature_map,
        "unit": spec.unit,
        "step_size": spec.step_size,
        "delta_rule": spec.delta_rule,
    }
    return StepTile(**{name: tl.constexpr(value) for name, value in constants.items()})


def convolve_launch(inputs: RecurrentStepInputs, convolution: Convolution, mixed: Tensor) -> Launch:
    """The launch of the kernel that convolves queries, keys and values into `mixed` [requests, channels]."""
    spec = inputs.spec
    query_size, value_size = spec.num_key_heads * spec.key_size, spec.num_heads * spec.value_size
    query_blocks, value_blocks = -(-query_size // BLOCK), -(-value_size // BLOCK)
    call = Convolve(
        query=by_head(side_by_side(inputs.query)),
        key=by_head(side_by_side(inputs.key)),
        value=by_head(side_by_side(inputs.value)),
        out=Rows(mixed, mixed.stride(0), None, 0),
        slots=inputs.state.slots,
        convolution=convolution,
        query_size=query_size,
        value_size=value_size,
        query_blocks=query_blocks,
        value_blocks=value_blocks,
        block=tl.constexpr(BLOCK),
    )
    programs = len(mixed) * (2 * query_blocks + value_blocks)
    return Launch(program=convolve_rows, programs=programs, call=call, warps=4, stages=1)


def finish_launch(inputs: RecurrentStepInputs, total: Tensor, output: GatedNorm) -> Launch:
    """The launch of the epilogue kernel over the sums `total` [requests, heads, columns]."""
    spec, heads = inputs.spec, group_of(inputs.spec)
    tile, warps = norm_tile(heads * spec.value_size)
    call = Finish(
        total=Rows(total, total.stride(0), None, heads * total.stride(1)),
        normalizer_eps=inputs.output.normalizer_eps if spec.normalizer else None,
        output=output,
        groups=spec.num_heads // heads,
        width=tile.width,
    )
    return Launch(program=finish_rows, programs=len(total) * call.groups, call=call, warps=warps, stages=1)


def convolved_inputs(inputs: RecurrentStepInputs, starts: tuple[int, int, int], mixed: Tensor) -> RecurrentStepInputs:
    """The inputs with queries, keys and values that are views of `mixed` [requests, channels] from their start on."""
    query, key, value = (
        mixed[:, start : start + rows.shape[1] * rows.shape[2]].view(rows.shape)
        for start, rows in zip(starts, (inputs.query, inputs.key, inputs.value), strict=True)
    )
    return replace(inputs, query=query, key=key, value=value)


def convolution_of(given: ConvolutionInputs, tail: Tensor | None) -> Convolution:
    """The kernel argument for a convolution with its last inputs cached in `tail` [slots, taps - 1, channels]."""
    taps = given.weight.shape[1]
    kept = NO_ROWS if tail is None or taps == 1 else Rows(tail, tail.stride(0), tail.stride(1), 0)
    places = tl.constexpr(max(2, power(taps)))
    return Convolution(given.weight, given.bias, kept, *given.starts, tl.constexpr(taps), places)


def decay_of(spec: RecurrentStepSpec, given: DecayInputs) -> DecayRows:
    """The kernel argument for the inputs of log decays."""
    rows = given.rows
    view = Rows(rows, 0 if rows.shape[0] == 1 else rows.stride(0), None, rows.stride(1))
    form, channels = tl.constexpr(spec.decay_form), tl.constexpr(spec.decay == "channel")
    return DecayRows(view, given.rate, given.bias, float(given.temperature), form, channels)


def rotary_of(inputs: RecurrentStepInputs) -> StepRotary:
    """The kernel argument for cosines and sines."""
    if inputs.cos_sin is None:
        return NO_ROTARY
    cosines, sines = (part.contiguous() for part in inputs.cos_sin)
    rotated, neighbours = tl.constexpr(cosines.shape[-1]), tl.constexpr(inputs.spec.rotary == "pairs")
    return StepRotary(cosines, sines, cosines.stride(0), rotated, neighbours)


def output_of(inputs: RecurrentStepInputs, out: Tensor) -> GatedNorm:
    """The kernel argument for the epilogue, over groups of heads that are normalized together."""
    spec, given = inputs.spec, inputs.output
    size = group_of(spec) * spec.value_size
    own = given.norm is not None and given.norm.shape[0] == spec.num_heads * spec.value_size
    gate = NO_ROWS
    if given.gate is not None:
        gate = Rows(given.gate, given.gate.stride(0), None, group_of(spec) * given.gate.stride(1))
    return GatedNorm(
        weight=given.norm,
        step=size if own else 0,
        gate=gate,
        out=Rows(out, out.stride(0), None, size),
        eps=given.eps,
        size=tl.constexpr(size),
        normed=tl.constexpr(spec.norm_heads > 0),
        gate_form=tl.constexpr(spec.gate),
        norm_first=tl.constexpr(spec.norm_before_gate),
    )


def group_of(spec: RecurrentStepSpec) -> int:
    """The number of heads in a group of the epilogue."""
    return max(1, spec.norm_heads)


def by_head(rows: Tensor) -> Rows:
    """The kernel argument for a tensor [request, head, size]."""
    return Rows(rows, rows.stride(0), None, rows.stride(1))


def side_by_side(rows: Tensor) -> Tensor:
    """The tensor [request, head, size] with contiguous heads, copied if they are not."""
    return rows if rows.stride(1) == rows.shape[2] or rows.shape[1] == 1 else rows.contiguous()
