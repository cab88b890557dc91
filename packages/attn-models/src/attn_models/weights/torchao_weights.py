"""Folders with weights that torchao (https://github.com/pytorch/ao) quantised and transformers saved as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_models.weights.fp8_weights import FLOAT8
from attn_models.weights.safetensors_files import LazyTensors, TensorEntry
from attn_models.weights.stored_format import Allowed, StoredFormat, refused

if TYPE_CHECKING:
    from torch import Tensor

PACKED = "Int4Tensor"
CODES: Mapping[str, tuple[str, ...]] = {
    "Int8Tensor": ("I8",),
    "IntxUnpackedToInt8Tensor": ("I8",),
    "Float8Tensor": (FLOAT8,),
    PACKED: ("I8", "U8"),
}
"""torchao's classes of weights that are read, with the dtypes of their codes."""
PARTS = ("qdata", "scale", "zero_point")


class TorchAo(StoredFormat):
    """Integers, each in a byte, and FP8: the difference of codes from zero points, times scales; or integers of 4 bits.

    Scales and zero points have a matrix each, whose elements belong to equal blocks of the weight. Of integers of 4
    bits, a byte [outputs, inputs / 2] has two, the lower bits first; their scales are [groups, outputs], and their zero
    points are floats that are added to the product. Quantisation of inputs is not followed.
    """

    allowed: ClassVar[Allowed] = dict.fromkeys(
        ("quant_type", "quant_type_kwargs", "include_input_output_embeddings", "untie_embedding_weights")
    )

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        super().__init__(config, path)
        self.kinds: dict[str, str] = {}

    def open(self, tensors: LazyTensors) -> None:
        """Read the class of each weight from the headers' metadata."""
        for name, said in tensors.metadata().items():
            if said.startswith("{"):
                try:
                    self.kinds[name] = str(json.loads(said)["_type"])
                except (ValueError, KeyError) as error:
                    raise self.fail(name, f"has metadata that do not name its class: {error}") from error

    def weights(self, entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, str]]:
        """The weights whose class is torchao's, of those that the headers name."""
        found = {}
        for name, kind in self.kinds.items():
            if kind == "Tensor":
                continue
            module, _, leaf = name.rpartition(".")
            stem = f"{module}._{leaf}_"
            own = [entry.removeprefix(stem) for entry in entries if entry.startswith(stem)]
            if kind not in CODES or not set(own) <= set(PARTS):
                raise refused(self.path, "quant_type", f"{kind} of {', '.join(own)} for {name}", ", ".join(CODES))
            for part in PARTS if kind == PACKED else PARTS[:2]:
                if part not in own:
                    raise self.fail(stem + part, f"is missing, although {name!r} is {kind}")
            found[name] = {part: stem + part for part in own}
        return found

    def shape(self, name: str, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> tuple[int, ...]:
        """The shape of the codes, or [outputs, inputs] of integers of 4 bits."""
        kind, codes = self.kinds[name], entries[parts["qdata"]]
        packed = kind == PACKED
        shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if packed and codes.shape else codes.shape
        for part in (part for part in PARTS[1:] if part in parts):
            blocks = entries[parts[part]].shape[::-1] if packed else entries[parts[part]].shape
            fits = len(blocks) == len(shape) and all(n and size % n == 0 for size, n in zip(shape, blocks, strict=True))
            if codes.dtype not in CODES[kind] or (packed and len(shape) != 2) or not (fits or prod(blocks) == 1):
                given = f"{codes.dtype} {list(codes.shape)}, {part} {list(entries[parts[part]].shape)}"
                raise self.fail(name, f"is {kind} with codes {given}, which do not fit together")
        return shape

    def kept_bytes(self, parts: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> int | None:  # noqa: ARG002
        """None: no kernel multiplies these formats as they are stored."""
        return None

    def dequantized(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32."""
        import torch

        codes, scale, zero = parts["qdata"], parts["scale"].float(), parts.get("zero_point")
        if zero is None or not zero.is_floating_point():
            numbers = codes.float() if zero is None else codes.float() - _spread(zero.float(), codes.shape)
            return numbers * _spread(scale, codes.shape)
        packed = codes.view(torch.uint8)
        numbers = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int8)
        signed = torch.where(numbers > 7, numbers - 16, numbers).float()
        return signed * _spread(scale.T, signed.shape) + _spread(zero.float().T, signed.shape)


def _spread(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Repeat the elements of `values`, each of which belongs to one of equal blocks of `shape`."""
    if values.numel() == 1:
        return values.reshape(()).expand(shape)
    for axis, size in enumerate(shape):
        values = values.repeat_interleave(size // values.shape[axis], axis)
    return values
