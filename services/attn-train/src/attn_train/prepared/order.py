"""The order in which prepared data is read: shuffled epochs, mixtures with weights, and rows packed from documents.

What a run reads next follows from its seed and its `Position`, a few numbers that checkpoints save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from attn_core.errors import InvalidValue
from numpy.typing import NDArray
from torch import Tensor

from attn_train.prepared.shards import FIELD, PreparedSet
from attn_train.tasks.base import PADDED

ROUNDS = 4
"""Rounds of the Feistel network by which places are shuffled (Luby and Rackoff 1988: four are a permutation that
cannot be told from a random one)."""
GOLDEN, ONE, OTHER = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele et al. 2014) of each number."""
    with np.errstate(over="ignore"):
        values = values + GOLDEN
        values = (values ^ (values >> np.uint64(30))) * ONE
        values = (values ^ (values >> np.uint64(27))) * OTHER
        return values ^ (values >> np.uint64(31))


def shuffled(place: int, count: int, seed: int) -> int:
    """Where place `place` of 0 to `count`, exclusive, is in the order of this seed; no order is held in memory."""
    bits = max(1, math.ceil(math.log2(count) / 2)) if count > 1 else 1
    mask, found = (1 << bits) - 1, place
    keys = [int(mixed(np.array([(seed + number) & (2**64 - 1)], dtype=np.uint64))[0]) for number in range(ROUNDS)]
    while True:
        left, right = found >> bits, found & mask
        for key in keys:
            turned = int(mixed(np.array([right ^ key], dtype=np.uint64))[0]) & mask
            left, right = right, left ^ turned
        found = left << bits | right
        # Places beyond the count are walked on from: they lie on the same cycle.
        if found < count:
            return found


class PackedRow(NamedTuple):
    """A training sequence: inputs and targets, int64 [tokens], targets that are not learned PADDED, and the number in
    the row of the document of each input."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64]


class Reader(Protocol):
    """Rows of one set in order."""

    items: int
    """Windows or records of an epoch."""

    def row(self, position: int, seed: int) -> tuple[PackedRow, int]:
        """The row that begins with item `position`, counted over all epochs, and the position after it."""
        ...


@dataclass(frozen=True, eq=False)
class WindowReader:
    """Consecutive windows of `context` tokens of texts that lie end to end, in shuffled order."""

    data: PreparedSet
    context: int

    def __post_init__(self) -> None:
        if not self.items:
            allowed = f"more than the context of {self.context} tokens"
            raise InvalidValue.of(FIELD, f"{self.data.folder} with {self.data.tokens} tokens", allowed)

    @property
    def items(self) -> int:
        """Windows."""
        return (self.data.tokens - 1) // self.context

    def row(self, position: int, seed: int) -> tuple[PackedRow, int]:
        """One window; what is learned of the last token of a document is its end, and of the first one nothing."""
        epoch, place = divmod(position, self.items)
        start = shuffled(place, self.items, seed + epoch) * self.context
        ids, _, ends = self.data.window(start, start + self.context + 1)
        ids = ids.astype(np.int64)
        targets = ids[1:].copy()
        inner = ends[ends < self.context + 1]
        targets[inner - 1] = PADDED
        begins = np.zeros(self.context, dtype=np.int64)
        begins[inner[inner < self.context]] = 1
        return PackedRow(ids[:-1], targets, np.cumsum(begins)), position + 1


@dataclass(frozen=True, eq=False)
class RecordReader:
    """Rows packed with whole records, in shuffled order, as many as fit; records longer than a row are left out."""

    data: PreparedSet
    context: int

    def __post_init__(self) -> None:
        if not any((lengths <= self.context + 1).any() for lengths in self.data.lengths()):
            allowed = f"at least one conversation of at most {self.context + 1} tokens (max_seq_len)"
            raise InvalidValue.of(FIELD, f"{self.data.folder} with {self.data.records} conversations", allowed)

    @property
    def items(self) -> int:
        """Records."""
        return self.data.records

    def row(self, position: int, seed: int) -> tuple[PackedRow, int]:
        """As many records as fit, and padding."""
        inputs, targets = np.zeros(self.context, dtype=np.int64), np.full(self.context, PADDED, dtype=np.int64)
        documents = np.zeros(self.context, dtype=np.int64)
        filled = number = 0
        while True:
            epoch, place = divmod(position, self.items)
            (found,) = self.data.record(shuffled(place, self.items, seed + epoch))
            size = len(found.ids) - 1
            if size > self.context - filled and (filled or size <= self.context):
                break
            if 0 < size <= self.context:
                span = slice(filled, filled + size)
                inputs[span], documents[span] = found.ids[:-1], number
                kept = np.ones(size, dtype=bool) if found.learned is None else found.learned[1:].astype(bool)
                targets[span] = np.where(kept, found.ids[1:].astype(np.int64), PADDED)
                filled, number = filled + size, number + 1
            position += 1
            if filled == self.context:
                break
        documents[filled:] = number
        return PackedRow(inputs, targets, documents), position


@dataclass(frozen=True)
class MixedSource:
    """A part of a mixture: its share of the rows, and how often it is read at most (0: as often as needed)."""

    name: str
    reader: Reader
    weight: float = 1.0
    epochs: float = 0.0

    @property
    def most(self) -> float:
        """Items that may be read."""
        return self.epochs * self.reader.items if self.epochs else math.inf


class Mixture:
    """Rows of several sources, each drawn with the probability of its weight, from a seed.

    `position` is all that a checkpoint needs. Raises `InvalidValue` where all sources are read as often as they may be.
    """

    def __init__(self, sources: Sequence[MixedSource], seed: int) -> None:
        self.sources, self.seed = tuple(sources), seed
        self._items = [0] * len(sources)
        self._rows = 0

    @property
    def epochs(self) -> Mapping[str, float]:
        """How often each source has been read, by name."""
        return {s.name: read / s.reader.items for s, read in zip(self.sources, self._items, strict=True)}

    def position(self) -> dict[str, Tensor]:
        """Rows drawn so far, and the items of each source that were read, int64."""
        return {"rows": torch.tensor([self._rows]), "items": torch.tensor(self._items)}

    def restore(self, position: Mapping[str, Tensor]) -> None:
        """Go on from a `position`; raises `InvalidValue` for one of another number of sources."""
        if len(position["items"]) != len(self.sources):
            given = f"{len(self.sources)} folders"
            raise InvalidValue.of(FIELD, given, f"{len(position['items'])}, as in the checkpoint")
        self._rows, self._items = int(position["rows"][0]), position["items"].tolist()

    def next_row(self) -> PackedRow:
        """The next row."""
        open_weights = [
            source.weight if read < source.most else 0.0 for source, read in zip(self.sources, self._items, strict=True)
        ]
        if not any(open_weights):
            read = ", ".join(f"{name} {epochs:g} times" for name, epochs in self.epochs.items())
            raise InvalidValue.of(FIELD, f"data that was read ({read})", "more epochs, or fewer steps")
        chance = int(mixed(np.array([(self.seed ^ self._rows) & (2**64 - 1)], dtype=np.uint64))[0]) / 2**64
        bounds = np.cumsum(open_weights) / sum(open_weights)
        place = min(int(np.searchsorted(bounds, chance, side="right")), len(self.sources) - 1)
        row, self._items[place] = self.sources[place].reader.row(self._items[place], self.seed + 7919 * place)
        self._rows += 1
        return row

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, documents and targets of the next rows, int64 [rows, tokens] each."""
        drawn = [self.next_row() for _ in range(rows)]
        stacked = [torch.from_numpy(np.stack(parts)) for parts in zip(*drawn, strict=True)]
        inputs, targets, documents = stacked
        return inputs, documents, targets
