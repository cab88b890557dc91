"""The order in which prepared data is read: shuffled epochs, weighted mixtures, and rows packed from documents.

What a run reads next depends only on its seed and its position, a few numbers that are saved in checkpoints.
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

from attn_train.data.token_shards.shards import FIELD, PreparedSet
from attn_train.tasks.base import PADDED

ROUNDS = 4
"""Rounds of the Feistel network that shuffles indices (Luby and Rackoff 1988: a permutation of four rounds is
indistinguishable from a random one)."""
GOLDEN, ONE, OTHER = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each number with SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        values = values + GOLDEN
        values = (values ^ (values >> np.uint64(30))) * ONE
        values = (values ^ (values >> np.uint64(27))) * OTHER
        return values ^ (values >> np.uint64(31))


def shuffled(place: int, count: int, seed: int) -> int:
    """Return the index at `place` in a random permutation of range(count), given by `seed`, without storing it."""
    bits = max(1, math.ceil(math.log2(count) / 2)) if count > 1 else 1
    mask, found = (1 << bits) - 1, place
    keys = [int(mixed(np.array([(seed + number) & (2**64 - 1)], dtype=np.uint64))[0]) for number in range(ROUNDS)]
    while True:
        left, right = found >> bits, found & mask
        for key in keys:
            turned = int(mixed(np.array([right ^ key], dtype=np.uint64))[0]) & mask
            left, right = right, left ^ turned
        found = left << bits | right
        # Cycle walking: a result beyond the count is permuted again, until it is in the range.
        if found < count:
            return found


class PackedRow(NamedTuple):
    """A training sequence: inputs and targets, with tokens that are not learned as PADDED targets, and for each input
    the index of its document in the row; int64 [tokens] each."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    documents: NDArray[np.int64]


class Reader(Protocol):
    """Reads the rows of one set, in shuffled order."""

    items: int
    """The number of windows or records in an epoch."""

    def row(self, position: int, seed: int, until: float = math.inf) -> tuple[PackedRow, int]:
        """Return the row that begins with item `position`, counted over all epochs, and the position after it; items
        from `until` on are not read."""
        ...


def window_row(data: PreparedSet, start: int, stop: int) -> PackedRow:
    """Return the row of the inputs `start` to `stop` of a set, in which the first token of a document is no target."""
    ids, _, ends = data.window(start, stop + 1)
    ids = ids.astype(np.int64)
    targets = ids[1:].copy()
    inner = ends[ends < len(ids)]
    targets[inner - 1] = PADDED
    begins = np.zeros(len(targets), dtype=np.int64)
    begins[inner[inner < len(targets)]] = 1
    return PackedRow(ids[:-1], targets, np.cumsum(begins))


@dataclass(frozen=True, eq=False)
class WindowReader:
    """Reads consecutive windows of `context` tokens of concatenated texts, in shuffled order."""

    data: PreparedSet
    context: int

    def __post_init__(self) -> None:
        if not self.items:
            allowed = f"more than the context of {self.context} tokens"
            raise InvalidValue.of(FIELD, f"{self.data.folder} with {self.data.tokens} tokens", allowed)

    @property
    def items(self) -> int:
        """The number of windows in an epoch."""
        return (self.data.tokens - 1) // self.context

    def row(self, position: int, seed: int, until: float = math.inf) -> tuple[PackedRow, int]:  # noqa: ARG002 -- one item
        """See `Reader.row`; a row is one window."""
        epoch, place = divmod(position, self.items)
        start = shuffled(place, self.items, seed + epoch) * self.context
        return window_row(self.data, start, start + self.context), position + 1


@dataclass(frozen=True, eq=False)
class RecordReader:
    """Packs rows with as many whole records as fit, in shuffled order; records longer than a row are left out."""

    data: PreparedSet
    context: int

    def __post_init__(self) -> None:
        if not any((lengths <= self.context + 1).any() for lengths in self.data.lengths()):
            allowed = f"at least one conversation of at most {self.context + 1} tokens (max_seq_len)"
            raise InvalidValue.of(FIELD, f"{self.data.folder} with {self.data.records} conversations", allowed)

    @property
    def items(self) -> int:
        """The number of records in an epoch."""
        return self.data.records

    def row(self, position: int, seed: int, until: float = math.inf) -> tuple[PackedRow, int]:
        """See `Reader.row`; a row is as many records as fit, followed by padding."""
        inputs, targets = np.zeros(self.context, dtype=np.int64), np.full(self.context, PADDED, dtype=np.int64)
        documents = np.zeros(self.context, dtype=np.int64)
        filled = number = 0
        while position < until:
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


def validation_records(data: PreparedSet, count: int, longest: int, seed: int) -> tuple[list[PackedRow], int]:
    """Return `count` records of a set as rows of their own, or all, and the number of those left out as longer than
    `longest` tokens."""
    rows = []
    chosen = min(count, data.records)
    for place in range(chosen):
        (found,) = data.record(shuffled(place, data.records, seed))
        ids = found.ids.astype(np.int64)
        learned = np.ones(len(ids), dtype=bool) if found.learned is None else found.learned.astype(bool)
        if 0 < len(ids) - 1 <= longest:
            rows.append(PackedRow(ids[:-1], np.where(learned, ids, PADDED)[1:], np.zeros(len(ids) - 1, dtype=np.int64)))
    return rows, chosen - len(rows)


@dataclass(frozen=True)
class MixedSource:
    """A source of a mixture: its weight, and the maximum number of epochs for which it is read (0: unlimited)."""

    name: str
    reader: Reader
    weight: float = 1.0
    epochs: float = 0.0

    @property
    def max_items(self) -> float:
        """The maximum number of items to read."""
        return self.epochs * self.reader.items if self.epochs else math.inf


class Mixture:
    """Draws rows from several sources, with probabilities proportional to their weights, from a seed.

    `position` is all that a checkpoint needs. Raises `InvalidValue` when all sources are exhausted.
    """

    def __init__(self, sources: Sequence[MixedSource], seed: int) -> None:
        self.sources, self.seed = tuple(sources), seed
        self._items = [0] * len(sources)
        self._rows = 0

    @property
    def epochs(self) -> Mapping[str, float]:
        """The number of epochs read of each source, by name."""
        return {s.name: read / s.reader.items for s, read in zip(self.sources, self._items, strict=True)}

    def position(self) -> dict[str, Tensor]:
        """Return the number of rows drawn so far, and of the items read of each source, int64."""
        return {"rows": torch.tensor([self._rows]), "items": torch.tensor(self._items)}

    def restore(self, position: Mapping[str, Tensor]) -> None:
        """Continue from a `position`; raises `InvalidValue` if it has another number of sources."""
        if len(position["items"]) != len(self.sources):
            given = f"{len(self.sources)} folders"
            raise InvalidValue.of(FIELD, given, f"{len(position['items'])} folders, the number in the checkpoint")
        self._rows, self._items = int(position["rows"][0]), position["items"].tolist()

    def next_row(self) -> PackedRow:
        """Return the next row."""
        open_weights = [
            source.weight if read < source.max_items else 0.0
            for source, read in zip(self.sources, self._items, strict=True)
        ]
        if not any(open_weights):
            epochs = ", ".join(f"{name} {epochs:g} times" for name, epochs in self.epochs.items())
            raise InvalidValue.of(FIELD, f"exhausted data ({epochs})", "more epochs, or fewer steps")
        chance = int(mixed(np.array([(self.seed ^ self._rows) & (2**64 - 1)], dtype=np.uint64))[0]) / 2**64
        bounds = np.cumsum(open_weights) / sum(open_weights)
        place = min(int(np.searchsorted(bounds, chance, side="right")), len(self.sources) - 1)
        source, seed = self.sources[place], self.seed + 7919 * place
        row, self._items[place] = source.reader.row(self._items[place], seed, source.max_items)
        self._rows += 1
        return row

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs, documents and targets of the next rows, int64 [rows, tokens] each."""
        drawn = [self.next_row() for _ in range(rows)]
        stacked = [torch.from_numpy(np.stack(parts)) for parts in zip(*drawn, strict=True)]
        inputs, targets, documents = stacked
        return inputs, documents, targets
