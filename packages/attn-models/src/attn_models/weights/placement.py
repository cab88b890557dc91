"""Where the tensors of a GGUF file go, and what its header says to that."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from attn_core.errors import CheckpointInvalid

from attn_models.weights.gguf_header import GgufHeader


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a GGUF tensor goes: its Hugging Face name and expected shape.

    `rotary_heads` is the number of heads whose rows must be reordered, 0 for none: GGUF keeps the two
    rows of a rotary pair side by side, Hugging Face half a head apart. `above` is by how much GGUF's
    numbers lie above Hugging Face's.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    rotary_heads: int = 0
    above: float = 0.0


def matched(header: GgufHeader, placements: Iterable[Placement], family: str) -> list[Placement]:
    """The placements in the file's order, after a check that no tensor is missing, left over or of a wrong shape.

    Raises CheckpointInvalid naming the tensor.
    """
    expected = {placement.source: placement for placement in placements}
    for name in header.tensors:
        if name not in expected:
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} has no place in a {family} model")
    for name, placement in expected.items():
        if name not in header.tensors:
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} is missing")
        if header.tensors[name].shape != placement.shape:
            given, needed = list(header.tensors[name].shape), list(placement.shape)
            raise CheckpointInvalid.of(header.path, f"tensor {name!r} has shape {given}; its model needs {needed}")
    return [expected[name] for name in header.tensors]


def shortest_float32(value: float) -> float:
    """The decimal with fewest digits that is the same float32: 1e-05 for 9.999999747378752e-06."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == packed:
            return candidate
    return value


def layer_count(header: GgufHeader) -> int:
    """The number of layers, no more than there are tensors."""
    layers = header.count(f"{header.text('general.architecture')}.block_count")
    if layers > len(header.tensors):
        raise CheckpointInvalid.of(header.path, f"{layers} layers in a file of {len(header.tensors)} tensors")
    return layers


def vocabulary_size(header: GgufHeader) -> int:
    """The rows of the embedding."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointInvalid.of(header.path, "tensor 'token_embd.weight' is missing or no matrix")
    return embedding.shape[0]


def count_or(header: GgufHeader, key: str, default: int) -> int:
    """The whole number under a key, or the default where there is none."""
    return header.count(key) if key in header.metadata else default


def number_or(header: GgufHeader, key: str, default: float) -> float:
    """The number under a key, or the default where there is none."""
    return header.number(key) if key in header.metadata else default
