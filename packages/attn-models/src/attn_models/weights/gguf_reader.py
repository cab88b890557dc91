"""A strict reader of GGUF headers: a hostile file is refused before any library reads it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Every count and
length is checked against the remaining bytes before it is used, so that time and memory are bounded by METADATA_BYTES
and ARRAY_ELEMENTS whatever the file claims.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid, Incompatible

Scalar = bool | int | float | str
Value = Scalar | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its name, shape in row-major order, GGML type name, its file, and offset and size in it in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    file: Path

    @property
    def elements(self) -> int:
        """The number of weights."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """Metadata by key and tensors by name, in the file's order; created by `read_gguf_header` only."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    def text(self, key: str) -> str:
        """The string under `key`. Raises CheckpointInvalid when it is absent or not a string."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def count(self, key: str) -> int:
        """The whole number >= 1 under `key`. Raises CheckpointInvalid when it is absent or anything else."""
        value = self.metadata.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._wrong(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str) -> float:
        """The finite number > 0 under `key`. Raises CheckpointInvalid when it is absent or anything else."""
        value = self.metadata.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._wrong(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under `key`, `default` when absent. Raises CheckpointInvalid for another type."""
        value = self.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """The array of strings under `key`. Raises CheckpointInvalid when it is absent or anything else."""
        value = self.metadata.get(key)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "an array of strings")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """The array of whole numbers under `key`. Raises CheckpointInvalid when it is absent or anything else."""
        value = self.metadata.get(key)
        if not isinstance(value, tuple) or not all(type(item) is int for item in value):
            raise self._wrong(key, value, "an array of whole numbers")
        return value

    def _wrong(self, key: str, value: object, needed: str) -> CheckpointInvalid:
        given = "is missing" if value is None else f"is {str(value)[:60]!r}"
        return CheckpointInvalid.of(self.path, f"metadata {key!r} {given}; needed: {needed}")


SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The struct format character of each GGUF value type of fixed size."""

STRING_TYPE = 8
ARRAY_TYPE = 9

METADATA_BYTES = 64 << 20
"""The limit on the size of all metadata together; a vocabulary of 262,144 tokens needs about 10 MB."""

ARRAY_ELEMENTS = 1 << 21
"""The limit on the elements of all arrays together; a vocabulary with its merges has about 800,000."""


class Cursor:
    """Reads little-endian values from `data`, which is all of the file at `path` or its beginning.

    Every method raises CheckpointInvalid instead of reading beyond the end.
    """

    def __init__(self, path: Path, data: bytes, file_size: int) -> None:
        self.path = path
        self.data = data
        self.file_size = file_size
        self.position = 0
        self._elements_left = ARRAY_ELEMENTS

    @property
    def left(self) -> int:
        """The number of bytes from the current position to the end of the file."""
        return self.file_size - self.position

    def fail(self, rule: str) -> CheckpointInvalid:
        """The error for a broken rule at the current position."""
        return CheckpointInvalid.of(self.path, f"{rule} (at byte {self.position})")

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return the position where they begin."""
        if count > self.left:
            raise self.fail(f"{what} needs {count} bytes and {self.left} are left")
        start = self.position
        if start + count > len(self.data):
            raise self.fail(f"the metadata is longer than {METADATA_BYTES} bytes")
        self.position += count
        return start

    def unsigned(self, size: int, what: str) -> int:
        """Read an unsigned integer of `size` bytes."""
        start = self.take(size, what)
        return int.from_bytes(self.data[start : start + size], "little")

    def text(self, what: str) -> str:
        """Read a string: its length in 8 bytes, then UTF-8."""
        start = self.take(8, what)
        length = int.from_bytes(self.data[start : start + 8], "little")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def value(self, key: str) -> Value:
        """Read a metadata value: its type in 4 bytes, then the value."""
        kind = self.unsigned(4, f"the type of {key!r}")
        if kind == ARRAY_TYPE:
            return self._array(key)
        return self._values(kind, 1, key)[0]

    def _array(self, key: str) -> tuple[Scalar, ...]:
        kind = self.unsigned(4, f"the element type of {key!r}")
        if kind == ARRAY_TYPE:
            raise self.fail(f"array {key!r} holds arrays; arrays may not be nested")
        count = self.unsigned(8, f"the length of {key!r}")
        # Checked before any allocation: a string takes at least its 8-byte length, a number at least 1 byte.
        if count > self.left // (8 if kind == STRING_TYPE else 1):
            raise self.fail(f"array {key!r} of {count} elements does not fit the {self.left} bytes left")
        if count > self._elements_left:
            raise self.fail(f"arrays of more than {ARRAY_ELEMENTS} elements in all, with {key!r}")
        self._elements_left -= count
        return self._values(kind, count, key)

    def _values(self, kind: int, count: int, key: str) -> tuple[Scalar, ...]:
        if kind == STRING_TYPE:
            what = f"a string of {key!r}"
            return tuple(self.text(what) for _ in range(count))
        if kind not in SCALAR_FORMATS:
            raise self.fail(f"{key!r} has the unknown value type {kind}")
        layout = struct.Struct(f"<{count}{SCALAR_FORMATS[kind]}")
        start = self.take(layout.size, f"{key!r}")
        if SCALAR_FORMATS[kind] == "?" and any(byte > 1 for byte in self.data[start : start + count]):
            raise self.fail(f"{key!r} holds a boolean that is neither 0 nor 1")
        return layout.unpack_from(self.data, start)


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


@cache
def _types() -> dict[int, tuple[str, int, int]]:
    """The name, the weights of a block and its bytes of each type of the gguf library, by its number."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}


PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a part of a model, by llama-gguf-split."""


def parts_of(path: str | Path) -> list[Path]:
    """The names of all parts of the model of which `path` is one, in order; the path itself for any other name."""
    found = PART.fullmatch(Path(path).name)
    if found is None:
        return [Path(path)]
    return [Path(path).with_name(f"{found[1]}-{n:05}-of-{found[3]}.gguf") for n in range(1, int(found[3]) + 1)]


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`; of one in parts, that of all parts beside it.

    Raises CheckpointInvalid naming the file, the rule and the byte, in bounded time and memory, for everything that is
    not a well-formed file: counts or lengths beyond its end, nested arrays, bad UTF-8, duplicate names, unknown types,
    overflowing shapes, data outside the file or overlapping; for a part that is missing or of another model; and
    Incompatible for a part whose name is not that of one.
    """
    header = _read_file(Path(path))
    count = header.metadata.get("split.count", 0)
    if count in (0, 1):
        return header
    files = parts_of(path)
    if len(files) != count:
        number = header.metadata.get("split.no", 0)
        place = f"part {number + 1 if isinstance(number, int) else number} of {count}"
        rule = f"is {place} of a model; all parts are read together, by their names NAME-00001-of-{count:05}.gguf"
        raise Incompatible(f"{header.path}: {rule}", path=header.path, what="split.count")
    parts = [_read_file(file) for file in files]
    for index, part in enumerate(parts):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (index, count):
            raise CheckpointInvalid.of(part.path, f"is not part {index + 1} of {count}, as its name says")
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if not len(tensors) == total == sum(len(part.tensors) for part in parts):
        raise CheckpointInvalid.of(files[0], f"its parts have {len(tensors)} tensors by name; needed: {total}")
    return GgufHeader(Path(path), parts[0].version, parts[0].metadata, tensors)


def _read_file(file_path: Path) -> GgufHeader:
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
    if kind not in _types():
        raise cursor.fail(f"tensor {name!r} has the unknown type {kind}")
    type_name, block, block_bytes = _types()[kind]
    if sizes[0] % block:
        raise cursor.fail(f"tensor {name!r} has rows of {sizes[0]}, not a multiple of {type_name}'s {block}")
    offset = cursor.unsigned(8, f"the offset of {name!r}")
    if offset % alignment:
        raise cursor.fail(f"tensor {name!r} begins at {offset}, not a multiple of the alignment {alignment}")
    nbytes = elements // block * block_bytes
    return GgufTensor(name, tuple(reversed(sizes)), type_name, offset, nbytes, cursor.path)


def _placed(cursor: Cursor, tensors: list[GgufTensor], start: int) -> dict[str, GgufTensor]:
    """The tensors with offsets from the beginning of the file instead of the beginning of the data."""
    for tensor in tensors:
        if start + tensor.offset + tensor.nbytes > cursor.file_size:
            raise cursor.fail(
                f"the data of tensor {tensor.name!r} extends beyond the end of the file, which is truncated"
            )
    for first, second in pairwise(sorted(tensors, key=lambda tensor: tensor.offset)):
        if first.offset + first.nbytes > second.offset:
            raise cursor.fail(f"the data of tensors {first.name!r} and {second.name!r} overlap")
    return {tensor.name: replace(tensor, offset=start + tensor.offset) for tensor in tensors}


PEEKED = 1 << 16


def is_gguf_adapter(file: Path) -> bool:
    """Whether a file is an adapter, by its first keys alone; False for a file that is not a GGUF file."""
    with file.open("rb") as opened:
        cursor = Cursor(file, opened.read(PEEKED), file.stat().st_size)
    try:
        _version(cursor)
        cursor.unsigned(8, "the number of tensors")
        for _ in range(_bounded(cursor, "metadata keys", _SMALLEST_ENTRY, MOST_KEYS)):
            key = cursor.text("a metadata key")
            value = cursor.value(key[:LONGEST_NAME])
            if key == "general.type":
                return value == "adapter"
    except CheckpointInvalid:
        pass  # the reader of the whole file says what is wrong
    return False


OTHER_KINDS = {
    "adapter": "a LoRA adapter; load it on its base model (`attn models load`), or merge it (`attn convert merge`)",
    "mmproj": "the image or audio encoder of a model; run the GGUF file of the language model itself",
    "imatrix": "statistics for quantising a model; run the model itself",
}
"""Values of `general.type` for files that are not models, and advice for the user."""
ENCODERS = ("clip", "mmproj")
"""Architectures of image and sound encoders, in files without `general.type`."""


def require_model(header: GgufHeader) -> None:
    """Raises Incompatible for a file that is not a model: an adapter, an image encoder, statistics."""
    kind = header.metadata.get("general.type", "model")
    if header.metadata.get("general.architecture") in ENCODERS:
        kind = "mmproj"
    if kind != "model":
        rule = OTHER_KINDS.get(str(kind), f"has general.type {str(kind)[:60]!r}; allowed: 'model'")
        message = f"is {rule}" if kind in OTHER_KINDS else rule
        raise Incompatible(f"{header.path}: {message}", path=header.path, what="general.type")
