"""One GGUF tensor as plain numbers: dequantised, its rotary rows reordered, rounded to the wanted dtype."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from attn_core.errors import CheckpointInvalid
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from attn_models.weights.gguf_header import GgufHeader, GgufTensor

WeightDtype = Literal["bfloat16", "float32"]
"""The dtype weights are stored in. bfloat16 rounds the dequantised values; float32 keeps them exactly."""

BYTES_OF = {"bfloat16": 2, "float32": 4}


def dequantised(header: GgufHeader, tensor: GgufTensor) -> NDArray[np.float32]:
    """The weights of `tensor` in its shape, float32.

    Raises CheckpointInvalid for NaN or infinity, and for a type that the gguf library cannot dequantise.
    """
    rows, row_bytes = tensor.elements // tensor.shape[-1], tensor.nbytes * tensor.shape[-1] // tensor.elements
    raw = np.memmap(header.path, np.uint8, "r", tensor.offset, (rows, row_bytes))
    try:
        values = dequantize(raw, GGMLQuantizationType[tensor.type])
    except NotImplementedError as error:
        raise CheckpointInvalid.of(header.path, f"tensor {tensor.name!r}: type {tensor.type} is no weight") from error
    if not np.isfinite(values).all():
        raise CheckpointInvalid.of(header.path, f"tensor {tensor.name!r} holds NaN or infinity")
    return values.reshape(tensor.shape)


def half_split_rows(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads * head_size, ...] from pairs side by side (0, 1), (2, 3), ... to pairs half a head apart.

    Row 2i of a head goes to i and row 2i + 1 to i + head_size / 2, so that RoPE written for rotated
    halves (RoFormer, arXiv:2104.09864, as in the Hugging Face Llama) computes the same.
    """
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def stored(values: NDArray[np.float32], dtype: WeightDtype) -> NDArray[Any]:
    """The values in the dtype's storage: float32 as they are, bfloat16 as its bits in uint16, rounded to even."""
    if dtype == "float32":
        return np.ascontiguousarray(values)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return rounded.astype(np.uint16)
