"""Reading and writing rows of a head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def start_of(view, batch, head):
    """The address of the first row of a head. In 64 bits: whole tensors may be large, one head is not."""
    return view.data + tl.cast(batch, tl.int64) * view.batch + tl.cast(head, tl.int64) * view.head


@triton.jit
def read(view, start, rows, count, size: tl.constexpr, width: tl.constexpr):
    """Rows [rows, width], zeros behind the last of `count` rows and behind `size`."""
    across = tl.arange(0, width)
    at = start + rows[:, None] * view.row + across[None, :]
    if size == width:
        found = tl.load(at, mask=rows[:, None] < count, other=0.0)
    else:
        found = tl.load(at, mask=(rows[:, None] < count) & (across[None, :] < size), other=0.0)
    return found


@triton.jit
def read_whole(view, start, rows, size: tl.constexpr, width: tl.constexpr):
    """Rows [rows, width] that all exist, zeros behind `size`."""
    across = tl.arange(0, width)
    at = start + rows[:, None] * view.row + across[None, :]
    return tl.load(at) if size == width else tl.load(at, mask=across[None, :] < size, other=0.0)


@triton.jit
def write(view, start, rows, count, content, size: tl.constexpr):
    """Write rows [rows, width] as far as they exist, in the type of the tensor."""
    across = tl.arange(0, content.shape[1])
    at = start + rows[:, None] * view.row + across[None, :]
    inside = (rows[:, None] < count) & (across[None, :] < size)
    tl.store(at, content.to(view.data.dtype.element_ty), mask=inside)
