"""A cache under test: models whose states it stores, and random requests, compared with `DictionaryStore`."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from attn_core import CacheFamily, Field, Fields, Paged, RaggedBatch, Slot, Source, StateSpec, installed
from attn_core.batch import Rows
from attn_core.errors import UserError
from attn_core.stores import ModelSpecs, StateStore, StoreSize
from torch import Tensor

from attn_testing.law import require, require_same, require_within
from attn_testing.memory import DictionaryStore
from attn_testing.serving import ragged

KEYS = {"key": Field((2, 3)), "value": Field((2, 4))}
SUMS = {"sum": Field((3, 2)), "count": Field((3,), "float64")}

SPECS: Mapping[str, ModelSpecs] = {
    "tokens": {"0": {"kv": Paged(KEYS)}, "1": {"kv": Paged(KEYS)}},
    "window": {"0": {"kv": Paged(KEYS, window=5)}},
    "window1": {"0": {"kv": Paged(KEYS, window=1)}},
    "every": {"0": {"kv": Paged(KEYS, every=3)}, "1": {"kv": Paged(KEYS, window=3)}},
    "slots": {"0": {"s": Slot(SUMS)}, "1": {"s": Slot({"h": Field((4,))})}},
    "source": {"0": {"source": Source(KEYS)}},
    "mixed": {
        "0": {"kv": Paged(KEYS), "s": Slot(SUMS)},
        "1": {"kv": Paged({"code": Field((3,), "int64"), "x": Field(())}, window=4), "source": Source(KEYS)},
        "2": {},
    },
    "bottleneck": {"0": {"source": Source(KEYS), "start": Source({"h": Field((4,))}, rows=1), "s": Slot(SUMS)}},
}
"""The state specs of test models, with each kind of state alone and all together."""

SIZE = StoreSize(tokens=96, requests=4)


@dataclass(frozen=True, eq=False)
class CacheCase:
    """A cache family and the state specs of one model."""

    family: CacheFamily
    specs: ModelSpecs
    label: str

    def create(self, size: StoreSize = SIZE) -> StateStore:
        """An empty store."""
        return self.family.create(self.specs, size)

    @property
    def paged(self) -> bool:
        """Whether the model has states with one row per token."""
        return any(isinstance(spec, Paged) for states in self.specs.values() for spec in states.values())


@dataclass(frozen=True, eq=False)
class CacheSubject:
    """A cache family under test, given by name or as an object."""

    given: str | CacheFamily

    @cached_property
    def family(self) -> CacheFamily:
        """The cache family; raises `UnknownName` if no plugin offers it."""
        return installed().caches.get(self.given) if isinstance(self.given, str) else self.given

    @cached_property
    def cases(self) -> list[CacheCase]:
        """The models whose states the cache accepts; it may refuse others with a `UserError`."""
        cases = [CacheCase(self.family, specs, label) for label, specs in SPECS.items()]
        return [case for case in cases if takes(case)]


def takes(case: CacheCase) -> bool:
    """Whether the cache accepts the states of this model."""
    try:
        case.create()
    except UserError:
        return False
    return True


SOURCE = 3
"""The smallest number of source rows; request n has n % `SOURCE` more."""
LARGEST = 127
"""The largest value that is written."""


class Traffic:
    """Random requests to a store and to its oracle in parallel; every view is compared when it is used."""

    def __init__(self, case: CacheCase, seed: int, size: StoreSize = SIZE) -> None:
        self.case = case
        self.store = case.create(size)
        everything = {
            layer: {state: unbounded(spec) for state, spec in states.items()} for layer, states in case.specs.items()
        }
        self.oracle = DictionaryStore(everything, size.dtype)
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.done: dict[int, int] = {}
        self.sources: dict[int, int] = {}
        self.next = 100

    def admit(self) -> bool:
        """Open a request, with its source; False if the store has no room for it."""
        name = self.next
        if not self.store.admit(name):
            return False
        self.next += 1
        self.oracle.admit(name)
        self.done[name] = 0
        self.sources[name] = SOURCE + name % SOURCE
        source = {
            layer: {
                state: self.draw(spec, spec.count(self.sources[name]))
                for state, spec in states.items()
                if isinstance(spec, Source)
            }
            for layer, states in self.case.specs.items()
        }
        source = {layer: states for layer, states in source.items() if states}
        if source:
            self.store.write_source(name, source)
            self.oracle.write_source(name, source)
        return True

    def release(self, name: int) -> None:
        """Release a request in both stores."""
        self.store.release(name)
        self.oracle.release(name)
        del self.done[name]

    def step(self, lengths: Mapping[int, int]) -> None:
        """Append the given number of new tokens to each request that the store has room for, and compare all views."""
        room = self.room(lengths)
        if not room:
            return
        names = self.store.order(list(room)) if self.random.random() < 0.5 else list(room)
        require(sorted(names) == sorted(room), f"order({list(room)}) returns different requests: {names}")
        batch = ragged([room[name] for name in names], [self.done[name] for name in names])
        views, truth = self.store.view(batch, names), self.oracle.view(batch, names)
        for layer, states in self.case.specs.items():
            require(
                set(views[layer]) == set(states),
                f"layer {layer} has views of the states {set(views[layer])}, not of {set(states)}",
            )
            for state, spec in states.items():
                self.compare(f"{layer}.{state}", spec, batch, views[layer][state], truth[layer][state])
        for name in names:
            self.done[name] += room[name]

    def room(self, lengths: Mapping[int, int]) -> dict[int, int]:
        """Reserve room for the new tokens; returns the requests for which the store had room, with their lengths."""
        return {name: n for name, n in lengths.items() if self.store.reserve(name, self.done[name] + n)}

    def compare(self, where: str, spec: StateSpec, batch: RaggedBatch, view: Any, truth: Any) -> None:
        """Use one view of a step, and that of the oracle, in the way a layer does, and compare them."""
        if isinstance(spec, Slot):
            for name, rows in truth.read().items():
                require_same(view.read()[name], rows, f"{where}.{name} as read and as last written", 0)
            new = self.draw(spec, batch.requests)
            view.write(new)
            truth.write(new)
            return
        if isinstance(spec, Paged):
            new = self.draw(spec, sum(map(len, batch.new_rows(spec.every))))
            view.append(new)
            truth.append(new)
        # Only rows per token may be stored with a loss of precision.
        error = LARGEST * self.case.family.loss if isinstance(spec, Paged) else 0.0
        for requests in self.readings(batch.requests):
            seen, real = view.rows(requests), truth.rows(requests)
            for place, request in enumerate(requests):
                first = 0
                if isinstance(spec, Paged) and spec.window is not None:
                    first = max(0, batch.contexts[request] - spec.window + 1)
                compare_rows(
                    f"{where}, request {request} of {batch.requests}", seen, real, Reading(place, first, error)
                )

    def readings(self, requests: int) -> list[Sequence[int]]:
        """Selections of requests to read: all at once, one alone, and a random subset in random order."""
        some = self.random.sample(range(requests), self.random.randint(1, requests))
        return [range(requests), [self.random.randrange(requests)], some][: 1 + min(requests, 2)]

    def draw(self, spec: StateSpec, rows: int) -> Fields:
        """Random rows [rows, ...] of every field, of integers that every dtype represents exactly."""
        return {name: self.numbers(rows, field) for name, field in spec.fields.items()}

    def numbers(self, rows: int, field: Field) -> Tensor:
        """Random integers [rows, *shape] from 1 to `LARGEST`, in the dtype of the field."""
        dtype = getattr(torch, field.dtype or self.oracle.dtype)
        return torch.randint(1, LARGEST + 1, (rows, *field.shape), generator=self.generator).to(dtype)


def unbounded(spec: StateSpec) -> StateSpec:
    """The spec without its window."""
    return dataclasses.replace(spec, window=None) if isinstance(spec, Paged) else spec


def by_position(rows: Rows, place: int) -> dict[int, int]:
    """The row index of each position among the unpadded rows of the request at `place`.

    Raises `LawBroken` if a position occurs twice.
    """
    positions = rows.positions[place].tolist()
    real = [True] * len(positions) if rows.key_padding_mask is None else rows.key_padding_mask[place].tolist()
    index_of = {position: i for i, position in enumerate(positions) if real[i]}
    require(len(index_of) == sum(real), f"a position occurs twice in {positions}")
    return index_of


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is expected of one request in some rows: its `place`, the `first` position that must be included, and the
    largest absolute `error` of a value."""

    place: int
    first: int
    error: float


def compare_rows(what: str, seen: Rows, real: Rows, reading: Reading) -> None:
    """Raise `LawBroken` unless `seen` has each row from `reading.first` on exactly once, and all rows are correct."""
    place = reading.place
    shown, written = by_position(seen, place), by_position(real, place)
    missing = sorted(position for position in written if position >= reading.first and position not in shown)
    require(not missing, f"{what}: positions {missing} are missing")
    extra = sorted(set(shown) - set(written))
    require(not extra, f"{what}: positions {extra} were never written")
    require(set(seen.fields) == set(real.fields), f"{what}: fields {set(seen.fields)}, not {set(real.fields)}")
    if not shown:
        return
    for name, rows in seen.fields.items():
        expected = real.fields[name][place, [written[position] for position in shown]]
        require(rows.dtype == expected.dtype, f"{what}: {name} is {rows.dtype}, not {expected.dtype}")
        error = reading.error if rows.dtype.is_floating_point else 0.0
        where = f"{what}: {name} at positions {list(shown)} and the values written"
        require_within(rows[place, list(shown.values())], expected, where, error)
