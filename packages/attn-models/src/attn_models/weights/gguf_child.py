"""The process that dequantises a GGUF file: `python -m attn_models.weights.gguf_child FILE FOLDER DTYPE BYTES`.

It limits its own memory to BYTES, reads the header again with the strict reader, reads the placements of tensors from
standard input, as JSON, writes safetensors into FOLDER and reports each tensor as a line of JSON on standard output. It
uses no torch, no pickle and no plugin.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from attn_core.errors import AttnError, CheckpointInvalid
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from attn_models.weights.block_layouts import GGUF_LAYOUTS, BlockLayout, gguf_values
from attn_models.weights.gguf_architectures import SCALED, Part, Placement, scale_of
from attn_models.weights.gguf_reader import GgufHeader, GgufTensor, read_gguf_header
from attn_models.weights.safetensors_files import WEIGHTS_NAME

SHARD_BYTES = 1 << 30
"""The size limit of a shard in bytes, unless one tensor alone is larger; bounds the memory of a conversion."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """File names with the names of their tensors, and the total size of all tensors in bytes."""

    files: dict[str, list[str]]
    total_bytes: int

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor."""
        return {tensor: file for file, tensors in self.files.items() for tensor in tensors}


def plan_shards(sizes: Mapping[str, int], limit: int = SHARD_BYTES) -> ShardPlan:
    """Assign tensors, in the order of `sizes` (name -> bytes), to shards of at most `limit` bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    total = sum(sizes.values())
    if len(groups) == 1:
        return ShardPlan({WEIGHTS_NAME: groups[0]}, total)
    count = len(groups)
    return ShardPlan({f"model-{n:05}-of-{count:05}.safetensors": group for n, group in enumerate(groups, 1)}, total)


WeightDtype = Literal["stored", "bfloat16", "float32"]
"""The dtype in which weights are written.

`stored` rounds nothing: matrices in blocks that kernels multiply stay in these blocks, bfloat16 stays bfloat16, and
everything else becomes float32. `bfloat16` rounds dequantised values, `float32` keeps them.
"""

BYTES_OF = {"bfloat16": 2, "float32": 4}


def blocks_kept(tensor: GgufTensor, placement: Placement) -> BlockLayout | None:
    """The layout of a tensor that stays in its blocks with `stored`; None for other tensors."""
    moved = placement.transposed or len(placement.shape) != 2 or 1 in placement.tiled[:1]
    return None if moved or _computed(placement) else GGUF_LAYOUTS.get(tensor.type)


def written_as(tensor: GgufTensor, placement: Placement, dtype: WeightDtype) -> tuple[str, tuple[int, ...]]:
    """The element type and shape in which a tensor is written."""
    if dtype != "stored":
        return dtype, placement.shape
    layout = blocks_kept(tensor, placement)
    if layout is not None:
        return "uint8", (placement.shape[0], placement.shape[1] // layout.inputs * layout.nbytes)
    return "bfloat16" if tensor.type == "BF16" and not _computed(placement) else "float32", placement.shape


def _computed(placement: Placement) -> bool:
    """Whether a tensor's values are computed, rather than copied from one tensor of the file."""
    return bool(placement.parts or placement.decay or placement.subtracted)


def raw_rows(tensor: GgufTensor, expert: int | None = None) -> NDArray[np.uint8]:
    """The bytes [rows, bytes of a row] of `tensor`, or only of index `expert` of its first axis."""
    rows, row_bytes = tensor.elements // tensor.shape[-1], tensor.nbytes * tensor.shape[-1] // tensor.elements
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (rows, row_bytes))
    return raw if expert is None else raw.reshape(tensor.shape[0], -1, row_bytes)[expert]


def _signs(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights of Q1_0: a float16 scale and the signs of 128 weights, from the lowest bit on."""
    blocks = rows.reshape(-1, 18)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return scales * (2 * np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) - 1)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of FP4 (E2M1) by their bits."""


def _nvfp4(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The weights of NVFP4: four scales (E4M3 without a sign) and four times 16 weights, low halves of bytes first."""
    blocks = rows.reshape(-1, 36)
    exponents, fractions = (blocks[:, :4] >> 3 & 15).astype(np.float32), (blocks[:, :4] & 7).astype(np.float32)
    scales = np.where(exponents == 0, fractions * 2**-9, (1 + fractions / 8) * 2 ** (exponents - 7))
    scales = np.where(blocks[:, :4] == 0x7F, 0, scales).astype(np.float32)
    packed = blocks[:, 4:].reshape(-1, 4, 8)
    values: NDArray[np.float32] = scales[:, :, None] * FP4[np.concatenate([packed & 15, packed >> 4], axis=2)]
    return values


READERS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.float32]]] = {"Q1_0": _signs, "NVFP4": _nvfp4}
"""Types that the gguf library names but does not dequantise."""


def dequantised(header: GgufHeader, tensor: GgufTensor, expert: int | None = None) -> NDArray[np.float32]:
    """The float32 weights of `tensor` in its shape, or only those of index `expert` of its first axis.

    They are multiplied by the tensor `.scale` beside it, a number for each of its first axis or one for all. Raises
    CheckpointInvalid for NaN or infinity, and for a type that the gguf library cannot dequantise.
    """
    rows, read = raw_rows(tensor, expert), READERS.get(tensor.type)
    try:
        values = gguf_values(rows, tensor.type) if read is None else read(rows)
    except NotImplementedError as error:
        raise CheckpointInvalid.of(
            header.path, f"tensor {tensor.name!r}: type {tensor.type} is not a type of weights"
        ) from error
    values = values.reshape(tensor.shape if expert is None else tensor.shape[1:])
    scale = header.tensors.get(scale_of(tensor.name)) if tensor.type in SCALED else None
    if scale is not None:
        factors = np.memmap(scale.file, "<f4", "r", scale.offset, (scale.elements, *[1] * (len(tensor.shape) - 1)))
        values = values * (factors if expert is None or len(factors) == 1 else factors[expert])
    if not np.isfinite(values).all():
        raise CheckpointInvalid.of(header.path, f"tensor {tensor.name!r} holds NaN or infinity")
    return values


def half_split_rows(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Reorder rows [heads * head_size, ...] from rotary pairs (0, 1), (2, 3), ... to pairs half a head apart.

    Row 2i of a head goes to i and row 2i + 1 to i + head_size / 2, so that RoPE written for rotated halves (RoFormer,
    arXiv:2104.09864, as in the Hugging Face Llama) computes the same.
    """
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def grouped_rows(values: NDArray[Any], sizes: tuple[int, ...], groups: int) -> NDArray[Any]:
    """Reorder rows of consecutive parts of these sizes to groups that each hold an equal share of every part."""
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return np.concatenate([part.reshape(groups, -1, *values.shape[1:]) for part in parts], axis=1).reshape(values.shape)


def stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The values as stored: float32 unchanged, bfloat16 as its bits in uint16, rounded to nearest even."""
    if dtype == "float32":
        return np.ascontiguousarray(values)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return rounded.astype(np.uint16)


REFUSED = 3
"""The exit status after a line {"refused": rule} was printed."""


def write_shards(header: GgufHeader, folder: Path, dtype: WeightDtype, files: Mapping[str, list[Placement]]) -> None:
    """Dequantise the tensors of each of `files` into a safetensors file of that name in `folder`."""
    done, total = 0, sum(len(placements) for placements in files.values())
    for file, placements in files.items():
        arrays: dict[str, NDArray[Any]] = {}
        for placement in placements:
            arrays[placement.target] = _values(header, placement, dtype)
            done += 1
            _tell({"done": done, "total": total})
        serialize_file(_specs(arrays), folder / file, {"format": "pt"})


def main(arguments: list[str]) -> int:
    """Run the conversion; returns the exit status: 0, or REFUSED after the rule was printed."""
    file, folder, dtype, limit = arguments
    with contextlib.suppress(ModuleNotFoundError, ValueError, OSError):  # Windows has no limits, macOS refuses them
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    files = {name: [_placement(item) for item in items] for name, items in json.load(sys.stdin).items()}
    try:
        write_shards(read_gguf_header(file), Path(folder), cast("WeightDtype", dtype), files)
    except AttnError as error:
        _tell({"refused": error.message})
        return REFUSED
    return 0


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


ELEMENTS = {"uint8": "uint8", "uint16": "bfloat16", "float32": "float32"}
"""The safetensors dtype by the name of the numpy dtype."""


def _specs(arrays: dict[str, NDArray[Any]]) -> dict[str, TensorSpec]:
    # safetensors.numpy has no bfloat16, so the bits are passed by address; `arrays` keeps them alive.
    return {
        name: TensorSpec(
            dtype=ELEMENTS[array.dtype.name], shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }


def _placement(item: dict[str, Any]) -> Placement:
    return Placement(**item | {"parts": tuple(Part(**part) for part in item["parts"])})


def joined(header: GgufHeader, placement: Placement) -> NDArray[np.float32]:
    """The parts of a placement, concatenated."""
    found = []
    for part in placement.parts:
        values = dequantised(header, header.tensors[part.source])
        values = values.transpose(part.axes) if part.axes else values
        found.append(values.reshape(part.view) if part.view else values)
    return np.concatenate(found, axis=placement.axis).reshape(placement.shape)


def _values(header: GgufHeader, placement: Placement, dtype: WeightDtype) -> NDArray[Any]:
    tensor = header.tensors[placement.source]
    layout = blocks_kept(tensor, placement) if dtype == "stored" else None
    if layout is not None:
        rows = raw_rows(tensor, placement.expert)
        if not layout.is_finite(rows):
            raise CheckpointInvalid.of(header.path, f"tensor {tensor.name!r} holds NaN or infinity")
        return np.ascontiguousarray(in_order(rows, placement))
    values = joined(header, placement) if placement.parts else dequantised(header, tensor, placement.expert)
    if placement.decay:
        if not (values < 0).all():
            raise CheckpointInvalid.of(header.path, f"tensor {placement.source!r} contains a decay that is not below 0")
        values = np.log(-values)
    values = in_order(values, placement)
    if placement.transposed:
        values = values.T
    if placement.subtracted:
        values = values - np.float32(placement.subtracted)
    return stored(values.reshape(placement.shape), written_as(tensor, placement, dtype)[0])


def in_order(rows: NDArray[Any], placement: Placement) -> NDArray[Any]:
    """The rows [outputs, ...] of a matrix in the order that the Hugging Face layout has."""
    if placement.rotary_heads:
        rows = half_split_rows(rows, placement.rotary_heads)
    if placement.tiled:
        axis, start, groups, heads = placement.tiled
        kept, last = np.split(rows, [start], axis)
        parts = last.reshape(*last.shape[:axis], heads, groups, -1, *last.shape[axis + 1 :]).swapaxes(axis, axis + 1)
        rows = np.concatenate([kept, parts.reshape(last.shape)], axis)
    return grouped_rows(rows, placement.fused, placement.groups) if placement.fused else rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
