"""A linear layer whose weights are packed in the layout that the kernels read."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Self

import torch
from attn_core.errors import InvalidValue
from torch import Tensor, nn

from attn_kernels_cpu.forms import FORMS, PANEL, Form
from attn_kernels_cpu.kept import KeptFile
from attn_kernels_cpu.library import LinearStruct, library
from attn_kernels_cpu.pages import LINE, LargePages

SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
"""The values of `Source` in native/kernels.cpp, by dtype."""

JOINED = 11
"""The value of `JOINED` in native/simd.hpp."""

TYPES = {"weights": torch.uint8, "scales": torch.uint8, "steps": torch.float32, "bias": torch.float32}
"""The dtypes of a layer's buffers."""

_PAGES = LargePages()


class PackedLinear(nn.Module):
    """A linear layer from [..., inputs] to [..., outputs], in the dtype of the inputs, with packed weights.

    Inputs are multiplied in float32, as sums of bfloat16 numbers, or as integers with a scale per 32 inputs, see
    `FORMS`; for block formats, `weight` is uint8 [outputs, bytes of a row], or several such matrices one below another.
    Each output is summed in one fixed order, so results are batch-invariant, bit for bit.
    """

    weights: Tensor
    scales: Tensor | None
    steps: Tensor | None
    bias: Any

    def __init__(self, form: str, weight: Tensor | Sequence[Tensor], bias: Tensor | None) -> None:
        super().__init__()
        self.form = form
        self.attention = FORMS[form].attention
        layout = FORMS[form]
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        file = KeptFile.of(form, parts, bias) if layout.block else None
        if any(len(part) % PANEL for part in parts[:-1]):
            parts = [torch.cat(parts)]
        self.outputs, self.inputs = sum(map(len, parts)), layout.inputs_of(parts[0].shape[1])
        for part in parts:
            if layout.block and (part.dtype != torch.uint8 or part.shape[1] % layout.block):
                given = f"{part.dtype} {tuple(part.shape)}"
                raise InvalidValue.of(
                    "weight", given, f"torch.uint8 [outputs, a multiple of {layout.block}] for {form}"
                )
        padded = layout.padded(self.outputs)
        sizes = {
            "weights": layout.size(self.outputs, self.inputs),
            "scales": padded * self.inputs // layout.group * layout.scale_bytes,
            "steps": 4 * padded if layout.steps else 0,
            "bias": 0 if bias is None else 4 * padded,
        }
        *starts, whole = accumulate((-(-size // LINE) * LINE for size in sizes.values()), initial=0)
        packed = None if file is None else file.read(whole)
        memory = _PAGES.room(whole) if packed is None else packed
        for (name, size), start in zip(sizes.items(), starts, strict=True):
            place = memory[start : start + size].view(TYPES[name]) if size else None
            self.register_buffer(name, place, persistent=False)
        self._library = library()
        addresses = map(_address, (self.weights, self.scales, self.steps, self.bias))
        self._struct = LinearStruct(layout.number, self.inputs, self.outputs, layout.parts, layout.int16, *addresses)
        self.address = ctypes.addressof(self._struct)
        if packed is not None:
            return
        if bias is not None:
            self.bias[: self.outputs] = bias
        self._pack(layout, parts)
        if file is not None:
            file.write(memory)

    def _pack(self, layout: Form, parts: Sequence[Tensor]) -> None:
        """Pack the rows of matrices one below another; all but the last have whole panels, and come in blocks."""
        first = 0
        for part in parts:
            source = part.detach()
            if layout.source is not None:
                source = source.to(getattr(torch, layout.source))
            elif not layout.block and source.dtype != torch.bfloat16:
                source = source.float()
            source = source.contiguous()
            below = LinearStruct.from_buffer_copy(self._struct)
            below.outputs = len(part)
            if first:
                below.weights += layout.size(first, self.inputs)
                below.scales += first * self.inputs // layout.group * layout.scale_bytes
            pointer = ctypes.addressof(below)
            self._library.attn_pack(source.data_ptr(), SOURCES[source.dtype], pointer, torch.get_num_threads())
            first += len(part)

    @classmethod
    def joined(cls, packed: Sequence[PackedLinear]) -> PackedLinear:
        """Join layers of the same inputs, in any forms, into one layer that concatenates their outputs."""
        whole = cls.__new__(cls)
        nn.Module.__init__(whole)
        whole._join(packed)  # noqa: SLF001 -- its own
        return whole

    def _join(self, packed: Sequence[PackedLinear]) -> None:
        self.packed = nn.ModuleList(packed)
        self.form = " and ".join(dict.fromkeys(part.form for part in packed))
        self.outputs, self.inputs = sum(part.outputs for part in packed), packed[0].inputs
        self.attention, self._library = 0, library()
        self._addresses = (ctypes.c_void_p * len(packed))(*(part.address for part in packed))
        sizes = JOINED, self.inputs, self.outputs, len(packed), 0
        self._struct = LinearStruct(*sizes, ctypes.addressof(self._addresses), None, None, None)
        self.address = ctypes.addressof(self._struct)

    def forward(self, rows: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]; raises `InvalidValue` for another size or device."""
        self._require(rows)
        wide = rows.to(torch.float32).contiguous()
        out = torch.empty(*rows.shape[:-1], self.outputs)
        count = out.numel() // self.outputs
        self._library.attn_linear(self.address, wide.data_ptr(), count, out.data_ptr(), torch.get_num_threads())
        return out.to(rows.dtype)

    def largest(self, rows: Tensor) -> Tensor | None:
        """See `attn_core.models.FindsLargest`; None for rows that are not float32, and for joined layers."""
        self._require(rows)
        if self._struct.format == JOINED or rows.dtype != torch.float32:
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
        """Leave the weights where they are, because the kernels hold their addresses."""
        return self

    def extra_repr(self) -> str:
        """The sizes and the weight format, for `repr`."""
        return f"inputs={self.inputs}, outputs={self.outputs}, weights={self.form}"


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
