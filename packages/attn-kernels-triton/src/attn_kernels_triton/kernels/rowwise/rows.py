"""Reading and writing tiles of a matrix."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def starts_of(view, rows):
    """The addresses of rows, in 64 bits: a matrix may have more elements than 32 bits count.

    Rows of one element lie one apart, which is a constant, and which Triton 3.6 knows as None inside of a loop.
    """
    places = rows.to(tl.int64)
    if view.row is not None:
        places = places * view.row
    return view.data + places


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
