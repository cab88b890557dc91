"""A bounded reader over the bytes of a GGUF header: it never believes a length before checking it."""

from __future__ import annotations

import struct
from pathlib import Path

from attn_core.errors import CheckpointInvalid

from attn_models.weights.gguf_header import Scalar, Value

SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type of a fixed size -> struct format character."""

STRING_TYPE = 8
ARRAY_TYPE = 9

METADATA_BYTES = 64 << 20
"""Most bytes of all metadata together; a vocabulary of 262,144 tokens needs about 10 MB."""

ARRAY_ELEMENTS = 1 << 21
"""Most elements of all arrays together; a vocabulary with its merges has about 800,000."""


class Cursor:
    """Reads little-endian values from `data`, the start of the file at `path` or all of it.

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
        """Bytes from here to the end of the file."""
        return self.file_size - self.position

    def fail(self, rule: str) -> CheckpointInvalid:
        """The error for a broken rule at this place."""
        return CheckpointInvalid.of(self.path, f"{rule} (at byte {self.position})")

    def take(self, count: int, what: str) -> int:
        """Step over `count` bytes and return where they begin."""
        if count > self.left:
            raise self.fail(f"{what} needs {count} bytes and {self.left} are left")
        start = self.position
        if start + count > len(self.data):
            raise self.fail(f"the metadata is longer than {METADATA_BYTES} bytes")
        self.position += count
        return start

    def unsigned(self, size: int, what: str) -> int:
        """A whole number of `size` bytes."""
        start = self.take(size, what)
        return int.from_bytes(self.data[start : start + size], "little")

    def text(self, what: str) -> str:
        """A string: its length in 8 bytes, then UTF-8."""
        start = self.take(8, what)
        length = int.from_bytes(self.data[start : start + 8], "little")
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def value(self, key: str) -> Value:
        """A metadata value: its type in 4 bytes, then the value."""
        kind = self.unsigned(4, f"the type of {key!r}")
        if kind == ARRAY_TYPE:
            return self._array(key)
        return self._values(kind, 1, key)[0]

    def _array(self, key: str) -> tuple[Scalar, ...]:
        kind = self.unsigned(4, f"the element type of {key!r}")
        if kind == ARRAY_TYPE:
            raise self.fail(f"array {key!r} holds arrays; arrays may not be nested")
        count = self.unsigned(8, f"the length of {key!r}")
        # Tested before multiplying out: the smallest string is its 8-byte length, the smallest number 1 byte.
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
