"""Reading and writing tiles of a matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def starts_of(view, rows):
    """The addresses of rows, in 64 bits: a matrix may have more elements than 32 bits count."""
    return view.data + rows.to(tl.int64) * view.row


@triton.jit
def read_tile(view, rows, count, columns, size: tl.constexpr):
    """Elements [rows, columns] in float32, zeros outside of the matrix."""
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    return tl.load(starts_of(view, rows)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def write_tile(view, rows, count, columns, size: tl.constexpr, content):
    """Write elements [rows, columns] as far as they exist, in the type of the matrix."""
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    at = starts_of(view, rows)[:, None] + columns[None, :]
    tl.store(at, content.to(view.data.dtype.element_ty), mask=inside)
