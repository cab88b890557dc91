"""When tiles of keys and values can be fetched by the chip's own copier (TMA), and how it is told where they lie."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_kernels_triton.attention.plan import Plan
from attn_kernels_triton.attention.tiles import Choice
from attn_kernels_triton.kernels.arguments import Places
from attn_kernels_triton.launch import power_of_two
from attn_kernels_triton.machine import interpreted

HOPPER = (9, 0)
ALIGNED = 16
"""Bytes of which everything that the copier is told must be a multiple."""


def copied(plan: Plan, *tensors: Tensor) -> bool:
    """Whether the programs of `programs.dense` compute this plan over these tensors [batch, row, head, size]."""
    rule, sizes = plan.rule, plan.sizes
    band = plan.lists is None and plan.places == Places() and rule.cap is None and rule.slopes is None
    alone = plan.texts is None and rule.bias is None and plan.dropped.state is None
    plain = band and alone and rule.scale > 0 and sizes.dtype.itemsize == 2 and all(map(torch.numel, tensors))
    return plain and has_copier(tensors[0].device) and all(map(aligned, tensors))


def has_copier(device: torch.device) -> bool:
    """Whether a device fetches tiles by itself."""
    if device.type != "cuda":
        return interpreted()
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= HOPPER


def aligned(tensor: Tensor) -> bool:
    """Whether rows and heads of a tensor begin where the copier can begin."""
    steps = [step * tensor.itemsize for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False) if size > 1]
    return tensor.data_ptr() % ALIGNED == 0 and all(step > 0 and step % ALIGNED == 0 for step in steps)


def described(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Tiles [1, 1, rows, width] of a tensor [batch, row, head, size], seen as [batch, head, row, size]."""
    turned = tensor.transpose(1, 2)
    # The step of an axis of one element means nothing, but the copier is particular about it too.
    least = ALIGNED // tensor.itemsize
    steps = [step if size > 1 else least for size, step in zip(turned.shape[:3], turned.stride(), strict=False)]
    return TensorDescriptor(turned, list(turned.shape), [*steps, 1], [1, 1, rows, power_of_two(tensor.shape[3])])


def tiles_of(choice: Choice, query: Tensor, key: Tensor, value: Tensor) -> tuple[TensorDescriptor, ...]:
    """The descriptors that a program of this choice is given."""
    if choice.schedule != "descriptors":
        return ()
    return described(query, choice.queries), described(key, choice.keys), described(value, choice.keys)
