"""Checks of the operands of attention before a kernel is launched."""

from __future__ import annotations

import torch
from attn_core import AttentionInputs, AttentionSpec
from attn_core.errors import InvalidValue
from attn_core.graph_safety import in_static_step
from attn_core.kernels.attend import check_varlen
from torch import Tensor

from attn_kernels_triton.backends.conditions import MAX_HEAD_DIM_DROPOUT
from attn_kernels_triton.launch import LARGEST_OFFSET
from attn_kernels_triton.machine import interpreted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FARTHEST = 2**30
"""The largest position and the largest reach of a mask, whose sums and differences still fit 32 bits."""


def check(spec: AttentionSpec, operands: AttentionInputs) -> None:
    """Raise `InvalidValue` for operands whose shapes, dtypes, devices, strides or sizes the kernels do not support."""
    query, key, value = operands.query, operands.key, operands.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_rows(name, tensor, query)
    batch, heads = query.shape[0], spec.heads
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "query": (query, (batch, query.shape[1], heads.query, heads.key_size)),
        "key": (key, (batch, key.shape[1], heads.key_value, heads.key_size)),
        "value": (value, (batch, key.shape[1], heads.key_value, heads.value_size)),
    }
    if operands.key_padding_mask is not None:
        expected["key_padding_mask"] = operands.key_padding_mask, (batch, key.shape[1])
    for name, (tensor, shape) in expected.items():
        check_like(name, tensor, shape, query.device)
    check_positions("query_positions", operands.query_positions, query)
    check_positions("key_positions", operands.key_positions, key)
    for name, weight in spec.weights.items():
        if name not in operands.parameters:
            raise InvalidValue.of(
                "parameters", sorted(operands.parameters), f"a mapping with {name} of shape {list(weight)}"
            )
        check_like(name, operands.parameters[name], weight, query.device)
    check_varlen(operands)
    check_biases(spec, operands)
    if operands.dropout is not None and max(heads.key_size, heads.value_size) > MAX_HEAD_DIM_DROPOUT:
        given = max(heads.key_size, heads.value_size)
        raise InvalidValue.of("dropout", f"over heads of size {given}", f"head sizes up to {MAX_HEAD_DIM_DROPOUT}")
    check_count("queries of all heads", batch * heads.query * query.shape[1])
    check_count("output: elements of a sequence", query.shape[1] * heads.query * heads.value_size)


def check_biases(spec: AttentionSpec, operands: AttentionInputs) -> None:
    """Raise `InvalidValue` if learned biases need gradients and positions are given.

    Their gradients are summed by distance, which must follow from the row numbers.
    """
    has_positions = operands.query_positions is not None or operands.key_positions is not None
    tables = [operands.parameters[name] for name in spec.weights if name.endswith("_bias.table")]
    if has_positions and torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        raise InvalidValue.of("positions", "given", "none, if learned biases need gradients")


def check_positions(name: str, places: Tensor | None, rows: Tensor) -> None:
    """Raise `InvalidValue` unless `places` is None or holds positions [batch or 1, row] of at most `FARTHEST`."""
    if places is None:
        return
    batch, count = rows.shape[:2]
    check_like(name, places, (batch if places.shape[:1] == (batch,) else 1, count), rows.device)
    if places.numel() and not in_static_step() and int(places.abs().max()) > FARTHEST:
        raise InvalidValue.of(name, int(places.abs().max()), f"at most {FARTHEST}")


def check_rows(name: str, tensor: Tensor, query: Tensor) -> None:
    """Raise `InvalidValue` unless a tensor is [batch, row, head, size] with the dtype and device of the queries and
    supported strides and sizes."""
    if tensor.dim() != 4:
        raise InvalidValue.of(name, list(tensor.shape), "four axes: batch, row, head, size")
    if tensor.device.type != "cuda" and not interpreted():
        raise InvalidValue.of(f"{name}.device", str(tensor.device), "a GPU: these kernels do not run on a CPU")
    if tensor.device != query.device:
        raise InvalidValue.of(f"{name}.device", str(tensor.device), f"{query.device}, as the queries")
    if tensor.dtype not in DTYPES or tensor.dtype != query.dtype:
        raise InvalidValue.of(f"{name}.dtype", str(tensor.dtype), "float32, bfloat16 or float16, as the queries")
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "one that ends in 1 (a contiguous last axis)")
    if any(step < 0 for step in tensor.stride()):
        raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "no negative stride")
    # Gradients are allocated contiguous, whatever the layout of the inputs.
    step = max(tensor.stride(1), tensor.shape[2] * tensor.shape[3])
    check_count(f"{name}: elements from the first to the last row of a head", tensor.shape[1] * step)


def check_like(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise `InvalidValue` unless a tensor has this shape and device."""
    if tuple(tensor.shape) != shape:
        raise InvalidValue.of(name, list(tensor.shape), str(list(shape)))
    if tensor.device != device:
        raise InvalidValue.of(f"{name}.device", str(tensor.device), f"{device}, as the queries")


def check_count(name: str, count: int) -> None:
    """Raise `InvalidValue` for a number above `LARGEST_OFFSET`."""
    if count > LARGEST_OFFSET:
        raise InvalidValue.of(name, count, f"at most {LARGEST_OFFSET}, the largest 32-bit offset")
