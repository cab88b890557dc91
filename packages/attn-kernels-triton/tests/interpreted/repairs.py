"""What Triton's interpreter computes wrongly or slowly, repaired for tests; seen on 3.6 and 3.9, declined upstream.

Products of bfloat16 multiply bit patterns; sums of any product have an order that numpy's library chooses by the chip
and the number of rows, where a matrix unit has one. Conversion to bfloat16 cuts off instead of rounding, that to e4m3
rounds some numbers to the wrong side and that from it reads bit patterns. Every call of a device function patches the
whole language anew, and every sum is checked for overflow.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Repair the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    product, conversion = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *options):
        if not d.dtype.scalar.is_floating():
            return product(self, a, b, d, *options)
        sums = np.matmul(widened(a), widened(b), dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    def cast_impl(self, source, target):
        if source.dtype.scalar == tl.float8e4nv and target.scalar in WIDER:
            return interpreter.TensorHandle(widened(source).astype(WIDER[target.scalar]), target.scalar)
        nearest = ROUNDINGS.get(target.scalar)
        if source.dtype.scalar != tl.float32 or nearest is None:
            return conversion(self, source, target)
        return interpreter.TensorHandle(nearest(source.data), target.scalar)

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    builder.create_fp_ext = builder.create_fp_trunc = lambda self, source, target: self.cast_impl(source, target)
    builder.create_fp_to_fp = lambda self, source, target, _: self.cast_impl(source, target)
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
    """The numbers of a handle in float32, or as they are in types that numpy knows."""
    if handle.dtype.scalar == tl.float8e4nv:
        codes = torch.from_numpy(np.ascontiguousarray(handle.data, dtype=np.uint8))
        return codes.view(torch.float8_e4m3fn).float().numpy()
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """The bit patterns, uint16, of the nearest bfloat16 numbers, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), nearest)


def rounded_to_codes(numbers: np.ndarray) -> np.ndarray:
    """The bit patterns, uint8, of the nearest e4m3 numbers, of the largest for those beyond it, as chips do."""
    given = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).clamp(-448.0, 448.0)
    return given.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


WIDER = {tl.float32: np.float32, tl.float16: np.float16}
"""Types that hold every number of e4m3, as numpy has them."""
ROUNDINGS = {tl.bfloat16: rounded, tl.float8e4nv: rounded_to_codes}
