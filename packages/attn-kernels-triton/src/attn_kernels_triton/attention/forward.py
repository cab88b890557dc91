"""Launching the forward kernel of attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from attn_core import AttentionInputs
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import GLUON, PAIRED_CHOICES, Choice, choice_of, dense_choice, tile_of
from attn_kernels_triton.attention.varlen import Listed
from attn_kernels_triton.kernels.arguments import Forward, Places
from attn_kernels_triton.kernels.attention_forward import attend_dense, attend_forward
from attn_kernels_triton.launch import Launch, power_of_two, rows
from attn_kernels_triton.machine import interpreted
from attn_kernels_triton.tuning.candidates import kind_of
from attn_kernels_triton.tuning.store import known

HOPPER = (9, 0)
ALIGNED = 16
"""The alignment in bytes that TMA requires of addresses and strides."""


def copied(plan: Plan, *tensors: Tensor) -> bool:
    """Whether the kernels that read tiles by TMA support this plan and these tensors [batch, row, head, size].

    They support band masks over 16-bit operands, with a positive scale and optionally sinks, and nothing else.
    """
    rule, sizes = plan.rule, plan.sizes
    band = plan.lists is None and plan.places == Places() and rule.cap is None and rule.slopes is None
    alone = plan.texts is None and rule.bias is None and plan.dropped.state is None
    plain = band and alone and rule.scale > 0 and sizes.dtype.itemsize == 2 and all(map(torch.numel, tensors))
    return plain and has_copier(tensors[0].device) and all(map(aligned, tensors))


def has_copier(device: torch.device) -> bool:
    """Whether a device has TMA (compute capability 9.0 or more)."""
    if device.type != "cuda":
        return interpreted()
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= HOPPER


def aligned(tensor: Tensor) -> bool:
    """Whether the address and the strides of a tensor are aligned as TMA requires."""
    steps = [step * tensor.itemsize for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    return tensor.data_ptr() % ALIGNED == 0 and all(step > 0 and step % ALIGNED == 0 for step in steps)


def described(tensor: Tensor, rows: int) -> TensorDescriptor:
    """The TMA descriptor of tiles [1, 1, rows, width] of a tensor [batch, row, head, size], viewed as [batch, head,
    row, size]."""
    turned = tensor.transpose(1, 2)
    # The stride of an axis of one element has no effect, but TMA requires a valid one.
    least = ALIGNED // tensor.itemsize
    steps = [step if size > 1 else least for size, step in zip(turned.shape[:3], turned.stride(), strict=False)]
    return TensorDescriptor(turned, list(turned.shape), [*steps, 1], [1, 1, rows, power_of_two(tensor.shape[3])])


def descriptors_of(choice: Choice, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """The TMA descriptors of queries, keys and values for a choice; none for kernels that read by pointers."""
    if choice.schedule == "pointers":
        return ()
    queries = choice.queries // 2 if choice.schedule == "paired" else choice.queries
    found = described(query, queries), described(key, choice.keys), described(value, choice.keys)
    if choice.schedule != "paired":
        return found
    from attn_kernels_triton.kernels.attention_forward_paired import laid_out

    return tuple(map(laid_out, found))


def program_of(choice: Choice) -> Any:
    """The forward kernel of a choice.

    The Gluon kernel is imported only if it is chosen, because Gluon's API may differ in other versions of Triton.
    """
    if choice.schedule != "paired":
        return PROGRAMS[choice.schedule]
    from attn_kernels_triton.kernels.attention_forward_paired import attend_paired

    return attend_paired


def pairs(device: torch.device) -> bool:
    """Whether paired kernels run here: they need Gluon as they know it and Hopper's warp-group matrix instructions."""
    return GLUON and device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


PROGRAMS = {"pointers": attend_forward, "descriptors": attend_dense}
"""The forward kernels by schedule, without that of Gluon, see `program_of`."""


class Inputs(NamedTuple):
    """Queries [batch, query, heads, key_size], keys and values [batch, key, key_value_heads, size]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Attended(NamedTuple):
    """The output [batch, query, heads, value_size] and the base-2 log-sum-exp `lse` [batch, heads, query], float32."""

    out: Tensor
    lse: Tensor


def inputs_of(operands: AttentionInputs) -> Inputs:
    """The queries, keys and values of operands."""
    return Inputs(operands.query, operands.key, operands.value)


def empty(plan: Plan, inputs: Inputs) -> Attended:
    """Allocate the output and lse of the forward kernel."""
    batch, queries, heads, _ = inputs.query.shape
    out = inputs.query.new_empty(batch, queries, heads, plan.sizes.value_size)
    return Attended(out, inputs.query.new_empty(batch, heads, queries, dtype=torch.float32))


def forward_launch(plan: Plan, inputs: Inputs, result: Attended) -> Launch:
    """The launch of the forward kernel, which fills `result`."""
    if copied(plan, *inputs):
        return launch_of(plan, inputs, result, chosen(plan, inputs.query.device))
    return launch_of(plan, inputs, result, choice_of("forward", plan.sizes))


def chosen(plan: Plan, device: torch.device) -> Choice:
    """The launch parameters of the forward kernel with TMA: measured, else the default."""
    found, paired = known(Choice, kind_of(plan.sizes, plan.rule).name, device), pairs(device)
    best = PAIRED_CHOICES.get(plan.sizes.width)
    if found is None and paired and best is not None and plan.rule.left is None:
        whole = plan.sizes.queries % best.queries == 0 and plan.sizes.keys % best.keys == 0
        found = best if whole else None
    return dense_choice(plan.sizes, found, pairs=paired)


def launch_of(plan: Plan, inputs: Inputs, result: Attended, choice: Choice) -> Launch:
    """The launch of the forward kernel of a choice."""
    tiles, texts = plan.tiles(Listed(choice.queries, by_key=False), inputs.query.device)
    call = Forward(
        query=rows(inputs.query),
        key=rows(inputs.key),
        value=rows(inputs.value),
        out=rows(result.out),
        lse=result.lse,
        shape=plan.shape,
        rule=plan.rule,
        places=plan.places,
        blocks=plan.by_query,
        tile=tile_of(choice, plan.sizes),
        texts=texts,
        dropout=plan.dropped,
        stages=tl.constexpr(choice.stages) if choice.schedule == "paired" else None,
    )
    return Launch(
        program=program_of(choice),
        programs=tiles * plan.shape.heads,
        call=call,
        warps=choice.warps,
        stages=choice.stages,
        tiles=descriptors_of(choice, *inputs),
    )
