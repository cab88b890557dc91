"""Specifications of the state of a request between steps: a mechanism declares them, the engine owns the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attn_core.errors import InvalidValue, UnknownName

ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype_name(name: str) -> str:
    """The full name of an element type, from its full or its short name (`bf16`)."""
    full = ALIASES.get(name, name)
    if full not in ELEMENT_BYTES:
        raise UnknownName.of("dtype", name, [*ELEMENT_BYTES, *ALIASES])
    return full


def element_bytes(name: str) -> int:
    """Bytes of one element of the type called `name`."""
    return ELEMENT_BYTES[dtype_name(name)]


@dataclass(frozen=True)
class Field:
    """A named tensor of a state: the shape of a row, and its element type where it must differ from the model's."""

    shape: tuple[int, ...]
    dtype: str | None = None

    def bytes(self, dtype: str) -> int:
        """Bytes of one row in a model of element type `dtype`."""
        return math.prod(self.shape) * element_bytes(self.dtype or dtype)


@dataclass(frozen=True)
class StateSpec:
    """The fields that one kind of state holds, by name."""

    fields: Mapping[str, Field]

    def row_bytes(self, dtype: str) -> int:
        """Bytes of one row of all fields."""
        return sum(field.bytes(dtype) for field in self.fields.values())

    def bytes(self, tokens: int, source: int, dtype: str) -> int:
        """Bytes of the state for a request of `tokens` cached tokens and `source` source tokens."""
        raise TypeError(f"{type(self).__name__} is not one of the three kinds of state: Paged, Slot, Source")


@dataclass(frozen=True)
class Paged(StateSpec):
    """One row per token of the sequence, such as keys and values; with a `window`, only the last `window` rows.

    With `every` above 1, one row per `every` tokens instead, such as a block of compressed keys: row r is written in
    the step that computes token number (r + 1) · `every` - 1, the last of its block, whose position is that of the row.
    """

    window: int | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvalidValue.of("every", self.every, "a whole number of tokens from 1")
        if self.every > 1 and self.window is not None:
            raise InvalidValue.of("window", self.window, "None for a row per several tokens")

    def bytes(self, tokens: int, source: int, dtype: str) -> int:
        """Bytes of min(tokens, window) rows, or of one for every `every` tokens."""
        kept = tokens // self.every if self.window is None else min(tokens, self.window)
        return kept * self.row_bytes(dtype)


@dataclass(frozen=True)
class Slot(StateSpec):
    """A state of fixed size per sequence, zero at its start, such as the sums of linear attention."""

    def bytes(self, tokens: int, source: int, dtype: str) -> int:
        """Bytes of one row, however long the sequence."""
        return self.row_bytes(dtype)


@dataclass(frozen=True)
class Source(StateSpec):
    """One row per token of the source, written once by `encode` and then only read.

    With `rows`, that many rows instead, however long the source is, such as one vector for the whole source.
    """

    rows: int | None = None

    def count(self, source: int) -> int:
        """Number of rows for a source of `source` tokens."""
        return source if self.rows is None else self.rows

    def bytes(self, tokens: int, source: int, dtype: str) -> int:
        """Bytes of `count(source)` rows."""
        return self.count(source) * self.row_bytes(dtype)


StateSpecs = Mapping[str, StateSpec]
"""The states of one layer by name, such as {"kv": Paged(...)}."""


def state_bytes(specs: StateSpecs, *, tokens: int, source: int = 0, dtype: str) -> int:
    """Bytes of one request in all states `specs` of a layer."""
    return sum(spec.bytes(tokens, source, dtype) for spec in specs.values())
