"""Rows of a cache as programs are told of them, and what is refused before any is read."""

from __future__ import annotations

import torch
from attn_core import AttentionSpec
from attn_core.errors import InvalidValue
from attn_core.kernels.paged import PagedOperands
from torch import Tensor

from attn_kernels_triton.attention.checks import DTYPES, FARTHEST, check_count, check_like
from attn_kernels_triton.kernels.paged_arguments import Memory
from attn_kernels_triton.machine import interpreted


def check(spec: AttentionSpec, operands: PagedOperands) -> None:
    """Raise `InvalidValue` for operands that the programs would misread or compute in the wrong type.

    That row numbers lie inside memory is asked once a step; see `paged.prepared`.
    """
    query, batch, rows = operands.query, operands.batch, operands.rows
    tokens = sum(batch.lengths)
    if query.device.type != "cuda" and not interpreted():
        raise InvalidValue.of("query.device", str(query.device), "a GPU: these kernels do not run on a CPU")
    if query.dtype not in DTYPES:
        raise InvalidValue.of("query.dtype", str(query.dtype), "float32, bfloat16 or float16")
    check_like("query", query, (tokens, spec.heads.query, spec.heads.key_size), query.device)
    if query.stride(2) != 1:
        raise InvalidValue.of("query.stride", list(query.stride()), "one that ends in 1: heads lie dense in memory")
    if rows.numbers.dim() != 2 or rows.numbers.shape[0] != batch.requests or len(rows.firsts) != batch.requests:
        given = list(rows.numbers.shape), len(rows.firsts)
        raise InvalidValue.of("rows.numbers, firsts", given, f"both of {batch.requests} requests")
    check_like("positions", batch.positions, (tokens,), query.device)
    check_like("rows.numbers", rows.numbers, tuple(rows.numbers.shape), query.device)
    if rows.numbers.dtype != torch.int64:
        raise InvalidValue.of("rows.numbers.dtype", str(rows.numbers.dtype), "int64: memory may have very many rows")
    check_count("query: elements from the first to the last head", spec.heads.query * query.stride(1))
    farthest = max((past + new for past, new in zip(batch.contexts, batch.lengths, strict=True)), default=0)
    if farthest > FARTHEST:
        raise InvalidValue.of("contexts", farthest, f"at most {FARTHEST} tokens of a request")
    for name, weight in spec.weights.items():
        if name not in operands.parameters:
            raise InvalidValue.of("parameters", sorted(operands.parameters), f"with {name}, {list(weight)}")
        check_like(name, operands.parameters[name], weight, query.device)
    if not set(operands.requests) <= set(range(batch.requests)):
        raise InvalidValue.of("requests", list(operands.requests), f"numbers below {batch.requests}")


def memory_of(operands: PagedOperands, name: str, heads: int, size: int) -> Memory:
    """The memory of a field of rows [row, heads, size], or [row, size] of one head; raises `InvalidValue`."""
    fields, query, form = operands.rows.fields, operands.query, operands.rows.form
    shape = (heads, size)
    if form == "plain":
        return Memory(*strides(part(fields, name, shape, query.dtype, query.device)))
    if form == "int8":
        codes = part(fields, f"{name}.codes", shape, torch.int8, query.device)
        scale = part(fields, f"{name}.scale", (heads,), torch.float16, query.device)
        return Memory(*strides(codes), *strides(scale))
    if form == "int4":
        codes = part(fields, f"{name}.codes", (heads, size // 2), torch.uint8, query.device)
        groups = (heads, size // 32)
        step = part(fields, f"{name}.step", groups, torch.float16, query.device)
        low = part(fields, f"{name}.low", groups, torch.float16, query.device)
        if step.stride() != low.stride():
            raise InvalidValue.of(f"{name}.low.stride", low.stride(), f"{step.stride()}, as {name}.step")
        return Memory(*strides(codes), *strides(step), low)
    raise InvalidValue.of("rows.form", form, "plain, int8, int4")


def part(fields: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [row, *shape] of the fields, dense along its last axis."""
    found = fields.get(name) if hasattr(fields, "get") else None
    if found is None:
        raise InvalidValue.of("rows.fields", sorted(fields), f"with {name}")  # type: ignore[call-overload]
    tensor: Tensor = found if found.dim() == len(shape) + 1 else found.unsqueeze(1)
    check_like(name, tensor, (tensor.shape[0], *shape), device)
    if tensor.dtype != dtype:
        raise InvalidValue.of(f"{name}.dtype", str(tensor.dtype), str(dtype))
    if len(shape) > 1 and tensor.stride(-1) != 1 and shape[-1] > 1:
        raise InvalidValue.of(f"{name}.stride", list(tensor.stride()), "one that ends in 1")
    return tensor


def strides(tensor: Tensor) -> tuple[Tensor, int, int]:
    """A tensor with its strides of rows and heads."""
    return tensor, tensor.stride(0), tensor.stride(1)
