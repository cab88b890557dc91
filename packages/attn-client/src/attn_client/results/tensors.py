"""Tensors of answers."""

from __future__ import annotations

from typing import cast

from attn.v1 import common_pb2
from attn_core.errors import InternalError

FLOAT_BYTES = 4


def floats_of(tensor: common_pb2.Tensor, shape: tuple[int, ...]) -> memoryview[float]:
    """The float32 numbers of a tensor, without a copy; raises `InternalError` for one that is not of this shape."""
    count = 1
    for size in shape:
        count *= size
    fits = tuple(tensor.shape) == shape and len(tensor.data) == FLOAT_BYTES * count
    if tensor.element_type != common_pb2.ELEMENT_TYPE_FLOAT32 or not fits:
        raise InternalError(f"the server sent numbers of shape {list(tensor.shape)} where {list(shape)} was due")
    return memoryview(tensor.data).cast("f", shape) if tensor.data else memoryview(b"").cast("f")


def rows_of(tensor: common_pb2.Tensor, rows: int) -> list[tuple[float, ...]]:
    """The rows of a tensor of two axes; raises `InternalError` unless there are so many."""
    width = tensor.shape[1] if len(tensor.shape) > 1 else 0
    values = cast("list[list[float]]", floats_of(tensor, (rows, width)).tolist())
    return [tuple(row) for row in values]
