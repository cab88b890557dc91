"""A linear layer whose weights lie as the kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Self

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_kernels_cpu.forms import FORMS
from attn_kernels_cpu.library import LinearStruct, library
from attn_kernels_cpu.pages import LargePages

GROUP = 32

_PAGES = LargePages()


class PackedLinear(nn.Module):
    """Rows [..., inputs] to [..., outputs], in the type of the rows.

    Products are taken in float32, of bfloat16 numbers that an input is the sum of, or of int8 with a step for every 32
    inputs of a row, see `FORMS`; each output is summed in one
    fixed order, so a row's result does not depend on the rows beside it, to the bit.
    """

    weights: Tensor
    scales: Tensor | None
    steps: Tensor | None
    bias: Tensor | None

    def __init__(self, form: str, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.form = form
        self.attention = FORMS[form].attention
        self.outputs, self.inputs = weight.shape
        layout = FORMS[form]
        padded = layout.padded(self.outputs)
        self.register_buffer("weights", _PAGES.room(layout.size(self.outputs, self.inputs)), persistent=False)
        scales = torch.empty(padded * self.inputs // GROUP * 2, dtype=torch.float16) if layout.groups else None
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("steps", torch.empty(padded) if layout.steps else None, persistent=False)
        room = None
        if bias is not None:
            room = torch.zeros(padded)
            room[: self.outputs] = bias
        self.register_buffer("bias", room, persistent=False)
        self._library = library()
        addresses = map(_address, (self.weights, self.scales, self.steps, room))
        self._struct = LinearStruct(layout.number, self.inputs, self.outputs, layout.parts, *addresses)
        self.address = ctypes.addressof(self._struct)
        source = weight.detach()
        if layout.source is not None:
            source = source.to(getattr(torch, layout.source))
        elif source.dtype != torch.bfloat16:
            source = source.float()
        source = source.contiguous()
        self._library.attn_pack(
            source.data_ptr(), source.dtype == torch.bfloat16, self.address, torch.get_num_threads()
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [..., inputs] to [..., outputs]; raises `InvalidValue` for rows of another size or elsewhere."""
        self._require(rows)
        wide = rows.to(torch.float32).contiguous()
        out = torch.empty(*rows.shape[:-1], self.outputs)
        count = out.numel() // self.outputs
        self._library.attn_linear(self.address, wide.data_ptr(), count, out.data_ptr(), torch.get_num_threads())
        return out.to(rows.dtype)

    def largest(self, rows: Tensor) -> Tensor | None:
        """See `attn_core.models.FindsLargest`; None for rows that are not float32, as outputs are."""
        self._require(rows)
        if rows.dtype != torch.float32:
            return None
        rows, places = rows.contiguous(), torch.empty(rows.shape[:-1], dtype=torch.int64)
        self._library.attn_largest(
            self.address, rows.data_ptr(), places.numel(), places.data_ptr(), torch.get_num_threads()
        )
        return places

    def _require(self, rows: Tensor) -> None:
        if rows.shape[-1] != self.inputs or rows.device.type != "cpu":
            given = f"{tuple(rows.shape)} on {rows.device}"
            raise InvalidValue.of("rows", given, f"[..., {self.inputs}] on the cpu")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: ARG002, FBT001, FBT002 -- torch's
        """Leave the weights as they are: the kernels know where they lie."""
        return self

    def extra_repr(self) -> str:
        """Sizes and format, as torch's own layers show theirs."""
        return f"inputs={self.inputs}, outputs={self.outputs}, weights={self.form}"


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
