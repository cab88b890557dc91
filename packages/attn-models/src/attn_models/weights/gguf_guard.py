"""The strict reader of GGUF headers: a hostile file is refused before any library sees it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
Every count and length is checked against the bytes that are left before it is used, so the time and
memory spent are bounded by METADATA_BYTES and ARRAY_ELEMENTS whatever the file claims.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from attn_core.errors import CheckpointInvalid
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from attn_models.weights.gguf_cursor import METADATA_BYTES, Cursor
from attn_models.weights.gguf_header import GgufHeader, GgufTensor, Value

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_KEYS = 1 << 16
MOST_TENSORS = 1 << 17
MOST_ELEMENTS = 1 << 40
MOST_DIMENSIONS = 4
LONGEST_NAME = 64
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = tuple(1 << power for power in range(3, 17))

_SMALLEST_ENTRY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
_TYPES = {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}


def read_gguf_header(path: str | Path) -> GgufHeader:
    """The checked header of the GGUF file at `path`.

    Raises CheckpointInvalid naming the file, the rule and the byte, in bounded time and memory, for
    everything that is not a well-formed file: counts or lengths beyond its end, nested arrays, bad
    UTF-8, duplicate names, unknown types, overflowing shapes, data outside the file or overlapping.
    """
    file_path = Path(path)
    try:
        with file_path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            data = file.read(METADATA_BYTES)
    except OSError as error:
        raise CheckpointInvalid.of(file_path, f"cannot be read: {error.strerror}") from error
    cursor = Cursor(file_path, data, size)
    version = _version(cursor)
    tensor_count = _bounded(cursor, "tensors", _SMALLEST_TENSOR, MOST_TENSORS)
    key_count = _bounded(cursor, "metadata keys", _SMALLEST_ENTRY, MOST_KEYS)
    metadata = _metadata(cursor, key_count)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if alignment not in ALIGNMENTS or type(alignment) is not int:
        raise cursor.fail(f"general.alignment is {alignment!r}; allowed: a power of two from 8 to 65536")
    tensors = _tensors(cursor, tensor_count, alignment)
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(file_path, version, metadata, _placed(cursor, tensors, start))


def _version(cursor: Cursor) -> int:
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise cursor.fail(f"begins with {magic!r}; a GGUF file begins with {MAGIC!r}")
    cursor.take(4, "the magic")
    version = cursor.unsigned(4, "the version")
    if version in (2 << 24, 3 << 24):
        raise cursor.fail("is big-endian; only little-endian GGUF is read")
    if version not in VERSIONS:
        raise cursor.fail(f"has GGUF version {version}; allowed: 2 and 3")
    return version


def _bounded(cursor: Cursor, what: str, smallest: int, most: int) -> int:
    count = cursor.unsigned(8, f"the number of {what}")
    if count > most or count > cursor.left // smallest:
        raise cursor.fail(f"{count} {what} do not fit a file of {cursor.file_size} bytes (at most {most})")
    return count


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        if not key or key in metadata:
            raise cursor.fail(f"the metadata key {key[:LONGEST_NAME]!r} is {'given twice' if key else 'empty'}")
        metadata[key] = cursor.value(key[:LONGEST_NAME])
    return metadata


def _tensors(cursor: Cursor, count: int, alignment: int) -> list[GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name = cursor.text("a tensor name")
        if not name or len(name.encode()) > LONGEST_NAME:
            raise cursor.fail(f"the tensor name {name[:LONGEST_NAME]!r} is not of 1 to {LONGEST_NAME} bytes")
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} is given twice")
        tensors[name] = _tensor(cursor, name, alignment)
    return list(tensors.values())


def _tensor(cursor: Cursor, name: str, alignment: int) -> GgufTensor:
    dimensions = cursor.unsigned(4, f"the dimensions of {name!r}")
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {dimensions} dimensions; allowed: 1 to {MOST_DIMENSIONS}")
    sizes = [cursor.unsigned(8, f"the shape of {name!r}") for _ in range(dimensions)]
    elements = 1
    for size in sizes:
        elements *= size
        if not 1 <= elements <= MOST_ELEMENTS:
            raise cursor.fail(f"tensor {name!r} of shape {sizes} is empty or beyond {MOST_ELEMENTS} elements")
    kind = cursor.unsigned(4, f"the type of {name!r}")
    if kind not in _TYPES:
        raise cursor.fail(f"tensor {name!r} has the unknown type {kind}")
    type_name, block, block_bytes = _TYPES[kind]
    if sizes[0] % block:
        raise cursor.fail(f"tensor {name!r} has rows of {sizes[0]}, not a multiple of {type_name}'s {block}")
    offset = cursor.unsigned(8, f"the offset of {name!r}")
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r} begins at {offset}, not a multiple of the alignment {alignment}")
    return GgufTensor(name, tuple(reversed(sizes)), type_name, offset, elements // block * block_bytes)


def _placed(cursor: Cursor, tensors: list[GgufTensor], start: int) -> dict[str, GgufTensor]:
    """The tensors with offsets counted from the file's beginning instead of from the data's."""
    for tensor in tensors:
        if start + tensor.offset + tensor.nbytes > cursor.file_size:
            raise cursor.fail(f"the data of tensor {tensor.name!r} lies beyond the end of the file")
    for first, second in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if first.offset + first.nbytes > second.offset:
            raise cursor.fail(f"the data of tensors {first.name!r} and {second.name!r} overlap")
    return {t.name: GgufTensor(t.name, t.shape, t.type, start + t.offset, t.nbytes) for t in tensors}
