"""The header of a safetensors file, read strictly before the library maps the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from attn_core.errors import CheckpointInvalid

from attn_models.weights.members import refuse_code_format
from attn_models.weights.strict_json import parse_json_object

HEADER_LIMIT = 16 << 20
"""Bytes; a header of 100,000 tensors has about 12 MB."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a header says of one tensor: safetensors dtype name, shape, and bytes on disk."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the safetensors file at `path`, by name.

    Checks what the library does not (duplicate keys, other formats under this name) and the lengths;
    overlaps, holes and shapes against sizes are left to the library, which refuses them on opening.

    Raises CheckpointInvalid naming the file and the rule.
    """
    try:
        refuse_code_format(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise CheckpointInvalid.of(path, f"a header of {length} bytes does not fit a file of {size} bytes")
            content = file.read(length)
    except OSError as error:
        raise CheckpointInvalid.of(path, f"cannot be read: {error.strerror}") from error
    entries = parse_json_object(content, path)
    entries.pop("__metadata__", None)
    return {name: _entry(path, name, entry) for name, entry in entries.items()}


def _entry(path: Path, name: str, entry: object) -> TensorEntry:
    if isinstance(entry, dict):
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if isinstance(dtype, str) and _counts(shape) and _counts(offsets) and len(offsets) == 2:
            return TensorEntry(dtype, tuple(shape), offsets[1] - offsets[0])
    raise CheckpointInvalid.of(path, f"the header entry of tensor {name!r} is malformed")


def _counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
