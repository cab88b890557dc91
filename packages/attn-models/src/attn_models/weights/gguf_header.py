"""What the header of a GGUF file says, once it has been checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid

Scalar = bool | int | float | str
Value = Scalar | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: shape in row-major order (rows first), GGML type name, place and size in the file in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """The number of weights."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key and tensors by name, in the file's order; made by `gguf_guard.read_gguf_header` only."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    def text(self, key: str) -> str:
        """The string under `key`. Raises CheckpointInvalid when it is absent or no string."""
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
