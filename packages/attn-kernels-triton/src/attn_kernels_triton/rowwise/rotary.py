"""Rotary position embedding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from attn_core.first_order import first_order_only
from torch import Tensor

from attn_kernels_triton.kernels.rowwise import Angles, RotaryTile, Rotate, rotate_rows
from attn_kernels_triton.launch import Launch, laid_like, rows, specialized, warm_up_backward
from attn_kernels_triton.rowwise.rows import ROTARY_HEADS, ROTARY_PAIRS, check_angles, check_rows, power

WARPS = 4


class Rotation(NamedTuple):
    """Cosines and sines [1 or batch, token, rotary size], whether pairs are neighbouring elements (`interleaved`) or in
    two halves, and whether the rotation is inverted (`back`)."""

    cosines: Tensor
    sines: Tensor
    interleaved: bool
    back: bool = False


def rotary_launch(given: Tensor, out: Tensor, rotation: Rotation) -> Launch:
    """The launch of the kernel over a tensor [batch, token, head, size]."""
    batch, tokens, heads, _ = given.shape
    tile = rotary_tile(given, rotation)
    strides = rotation.cosines.stride()
    shared = rotation.cosines.shape[0] == 1
    angles = Angles(rotation.cosines, rotation.sines, 0 if shared else strides[0], strides[1])
    call = Rotate(rows(given), rows(out), angles, tokens, heads, tile)
    programs = batch * -(-tokens // tile.tokens.value) * -(-heads // tile.heads.value)
    return Launch(program=rotate_rows, programs=programs, call=call, warps=WARPS, stages=1)


def rotary_tile(given: Tensor, rotation: Rotation) -> RotaryTile:
    """The compile-time constants of the kernel: its tile, the rotary size and the direction of the rotation."""
    _, tokens, heads, size = given.shape
    pairs = rotation.cosines.shape[-1] // 2
    rest = size - 2 * pairs
    constants = (
        min(max(1, ROTARY_PAIRS // power(pairs)), power(tokens)),
        min(ROTARY_HEADS, power(heads)),
        size,
        pairs,
        power(pairs),
        power(rest) if rest else 0,
        rotation.interleaved,
        rotation.back,
    )
    return RotaryTile(*map(tl.constexpr, constants))


class Rotated(torch.autograd.Function):
    """The rotation of a tensor [batch, token, head, size]; the gradient is rotated by the negative angles."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, rotation: Rotation) -> Tensor:
        """Run the kernel."""
        ctx.save_for_backward(rotation.cosines, rotation.sines)
        ctx.interleaved = rotation.interleaved
        return rotated(given, rotation)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, None]:
        """Run the kernel with negative angles on the gradient."""
        cosines, sines = ctx.saved_tensors
        change = laid_like(change, torch.empty_like(change, memory_format=torch.contiguous_format))
        return rotated(change, Rotation(cosines, sines, ctx.interleaved, back=True)), None


def rotated(given: Tensor, rotation: Rotation) -> Tensor:
    """Allocate the rotated tensor and run the kernel."""
    out = torch.empty_like(given, memory_format=torch.contiguous_format)
    rotary_launch(given, out, rotation).run(given.device)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def rotate(given: Tensor, cosines: Tensor, sines: Tensor, *, interleaved: bool) -> Tensor:
    """See `attn_core.RotaryKernel.rotate`; raises `InvalidValue`, see `rowwise.rows`."""
    check_rows("rows", given)
    check_angles(given, cosines, sines)
    whole = given if given.dim() == 4 else given[None]
    rotation = Rotation(by_sequence(cosines), by_sequence(sines), interleaved)
    numbers = (part for count in (*whole.shape[:3], len(rotation.cosines)) for part in specialized(count))
    kind = "rotary", interleaved, given.dtype, whole.shape[3], cosines.shape[-1], *numbers
    warm_up_backward((whole,), kind, lambda: rotated(dense_zeros(whole), rotation._replace(back=True)))
    out: Tensor = Rotated.apply(whole, rotation)  # type: ignore[no-untyped-call]
    return out.view(given.shape)


def dense_zeros(like: Tensor) -> Tensor:
    """A contiguous gradient of zeros."""
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def by_sequence(table: Tensor) -> Tensor:
    """Reshape cosines or sines [..., token, 1, rotary size] to [1 or batch, token, rotary size]."""
    flat = table[..., 0, :]
    return flat if flat.dim() == 3 else flat[None]
