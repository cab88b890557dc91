"""What Triton's interpreter computes wrongly or slowly, repaired for tests; seen on 3.6 and 3.9, declined upstream.

Products of bfloat16 multiply bit patterns, conversion to bfloat16 cuts off instead of rounding, every call of a device
function patches the whole language anew, and every sum is checked for overflow.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Repair the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    product, conversion = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *options):
        if tl.bfloat16 not in {a.dtype.scalar, b.dtype.scalar}:
            return product(self, a, b, d, *options)
        return interpreter.TensorHandle(np.matmul(widened(a), widened(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def cast_impl(self, source, target):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return conversion(self, source, target)
        return interpreter.TensorHandle(rounded(source.data), target.scalar)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_ext = builder.create_fp_trunc = lambda self, source, target: self.cast_impl(source, target)
    interpreter._patch_lang = PatchOnce(interpreter._patch_lang)
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


class PatchOnce:
    """Patches each module of the language for good, when it is first met."""

    def __init__(self, patch) -> None:
        self.patch = patch
        self.known = set()

    def __call__(self, function) -> PatchOnce:
        modules = {id(value) for value in function.__globals__.values() if value in (tl, tl.core)}
        if not modules <= self.known:
            self.patch(function)
            self.known |= modules
        return self

    def restore(self) -> None:
        """Nothing: all programs of this process are interpreted."""


def widened(handle) -> np.ndarray:
    """The numbers of a handle in float32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """The bit patterns, uint16, of the nearest bfloat16 numbers, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest)
