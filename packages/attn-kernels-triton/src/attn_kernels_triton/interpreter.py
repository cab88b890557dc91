"""What Triton's interpreter (`TRITON_INTERPRET=1`) computes wrongly, found by trying."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

SIZE = 16


@triton.jit  # type: ignore[untyped-decorator]
def product(left: Any, right: Any, out: Any, size: tl.constexpr) -> None:
    """Multiply two square matrices of `size` rows, summing in float32."""
    at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))


@cache
def multiplies(dtype: str) -> bool:
    """Whether the interpreter multiplies matrices of a type, such as "bfloat16", as it is defined.

    Triton 3.6 and 3.9 multiply the bit patterns of bfloat16.
    """
    left = torch.linspace(-2, 2, SIZE * SIZE).reshape(SIZE, SIZE).to(getattr(torch, dtype))
    out = torch.empty(SIZE, SIZE)
    product[(1,)](left, left.T.contiguous(), out, SIZE)
    exact = left.double() @ left.double().T
    return bool(((out - exact).abs() <= 1e-4 * (1 + exact.abs())).all())
