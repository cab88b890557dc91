"""Quantised blocks of integers with scales, in which weights are stored and multiplied without dequantising them first.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. `INT4_ZEROS` is attn's own: the GPTQ or AWQ
values of 32 inputs as a float16 scale, the zero point in one byte, and 16 bytes of integers in the order of Q4_0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """One kind of block.

    `weights` is the name by which kernels select the format, `nbytes` the size of a block, which holds `inputs`
    weights, `halves` the byte offsets of its float16 values, and `read` converts rows of blocks to float32.
    """

    weights: str
    nbytes: int
    inputs: int
    halves: tuple[int, ...]
    read: Callable[[Any], Any]

    def inputs_of(self, row_bytes: int) -> int | None:
        """The number of inputs in a row of `row_bytes` bytes; None where the row does not consist of whole blocks."""
        return None if row_bytes % self.nbytes else row_bytes // self.nbytes * self.inputs

    def dequantized(self, rows: Bytes) -> Floats:
        """Convert bytes [rows, bytes of a row] to float32 [rows, inputs] by the reference formula."""
        values: Floats = self.read(rows)
        return values

    def is_finite(self, rows: Any) -> bool:
        """Whether all scales of bytes [rows, bytes of a row], and therefore all weights, are finite.

        The bytes may be of numpy, or of torch on any device.
        """
        blocks = rows.reshape(-1, self.nbytes)
        # The exponent of a half float is the five bits below the sign.
        return all(bool(((blocks[:, place + 1] & 0x7C) != 0x7C).all()) for place in self.halves)


def _int4_zeros(rows: Bytes) -> Any:
    blocks = rows.reshape(-1, INT4_ZEROS_BYTES)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    numbers = np.concatenate([blocks[:, 3:] & 15, blocks[:, 3:] >> 4], axis=1).astype(np.float32)
    return (scales * (numbers - blocks[:, 2:3].astype(np.float32))).reshape(len(rows), -1)


INT4_ZEROS_BYTES = 19
INT4_ZEROS = BlockLayout(weights="int4_zeros", nbytes=INT4_ZEROS_BYTES, inputs=32, halves=(0,), read=_int4_zeros)


def gguf_values(rows: Bytes, kind: str) -> Floats:
    """Convert rows of blocks of the GGUF type `kind` to float32 by the formula of the gguf library.

    Raises `NotImplementedError` for a type that it cannot dequantise.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(rows, GGMLQuantizationType[kind])


def _of_gguf(kind: str, nbytes: int, *halves: int, inputs: int = 32) -> BlockLayout:
    read = partial(gguf_values, kind=kind)
    return BlockLayout(weights=kind.lower(), nbytes=nbytes, inputs=inputs, halves=halves, read=read)


GGUF_LAYOUTS: Mapping[str, BlockLayout] = {
    "Q8_0": _of_gguf("Q8_0", 34, 0),
    "Q4_0": _of_gguf("Q4_0", 18, 0),
    "Q4_1": _of_gguf("Q4_1", 20, 0, 2),
    "Q4_K": _of_gguf("Q4_K", 144, 0, 2, inputs=256),
    "Q6_K": _of_gguf("Q6_K", 210, 208, inputs=256),
}
"""Layouts by the name of a tensor's type in a GGUF file."""
