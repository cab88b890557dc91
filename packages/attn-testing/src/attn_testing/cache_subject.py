"""A cache under test: the models whose states it keeps, and random requests, compared with `DictionaryStore`."""

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
    "slots": {"0": {"s": Slot(SUMS)}, "1": {"s": Slot({"h": Field((4,))})}},
    "source": {"0": {"source": Source(KEYS)}},
    "mixed": {
        "0": {"kv": Paged(KEYS), "s": Slot(SUMS)},
        "1": {"kv": Paged({"code": Field((3,), "int64"), "x": Field(())}, window=4), "source": Source(KEYS)},
        "2": {},
    },
    "bottleneck": {"0": {"source": Source(KEYS), "start": Source({"h": Field((4,))}, rows=1), "s": Slot(SUMS)}},
}
"""States of models, each kind alone and all together."""

SIZE = StoreSize(tokens=96, requests=4)


@dataclass(frozen=True, eq=False)
class CacheCase:
    """A cache for one model."""

    family: CacheFamily
    specs: ModelSpecs
    label: str

    def create(self, size: StoreSize = SIZE) -> StateStore:
        """An empty store."""
        return self.family.create(self.specs, size)

    @property
    def paged(self) -> bool:
        """Whether the model remembers rows per token."""
        return any(isinstance(spec, Paged) for states in self.specs.values() for spec in states.values())


@dataclass(frozen=True, eq=False)
class CacheSubject:
    """A cache by name or as an object."""

    given: str | CacheFamily

    @cached_property
    def family(self) -> CacheFamily:
        """The cache itself; raises `UnknownName` where no plugin offers it."""
        return installed().caches.get(self.given) if isinstance(self.given, str) else self.given

    @cached_property
    def cases(self) -> list[CacheCase]:
        """The models whose states the cache takes; it may refuse others with a `UserError`."""
        cases = [CacheCase(self.family, specs, label) for label, specs in SPECS.items()]
        return [case for case in cases if takes(case)]


def takes(case: CacheCase) -> bool:
    """Whether the cache takes the states of this model."""
    try:
        case.create()
    except UserError:
        return False
    return True


SOURCE = 3
"""A source has this many rows, and one more for each that came before it, up to twice as many."""
LARGEST = 127
"""The largest number that is written."""


class Traffic:
    """A store and its oracle, driven together; every view is compared as it is used."""

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
        """Open a request, with its source; False if the store has no place."""
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
        """Close a request."""
        self.store.release(name)
        self.oracle.release(name)
        del self.done[name]

    def step(self, lengths: Mapping[int, int]) -> None:
        """Compute that many new tokens of each request that the store has room for, and compare all views."""
        room = self.room(lengths)
        if not room:
            return
        names = self.store.order(list(room)) if self.random.random() < 0.5 else list(room)
        require(sorted(names) == sorted(room), f"order({list(room)}) gives other requests: {names}")
        batch = ragged([room[name] for name in names], [self.done[name] for name in names])
        views, truth = self.store.view(batch, names), self.oracle.view(batch, names)
        for layer, states in self.case.specs.items():
            require(set(views[layer]) == set(states), f"layer {layer} sees {set(views[layer])}, not {set(states)}")
            for state, spec in states.items():
                self.compare(f"{layer}.{state}", spec, batch, views[layer][state], truth[layer][state])
        for name in names:
            self.done[name] += room[name]

    def room(self, lengths: Mapping[int, int]) -> dict[int, int]:
        """Those of the requests for whose new tokens the store has room, which they then hold."""
        return {name: n for name, n in lengths.items() if self.store.reserve(name, self.done[name] + n)}

    def compare(self, where: str, spec: StateSpec, batch: RaggedBatch, view: Any, truth: Any) -> None:
        """Use one view of a step as a layer would, and its oracle in the same way."""
        if isinstance(spec, Slot):
            for name, rows in truth.read().items():
                require_same(view.read()[name], rows, f"{where}.{name} as read and as last written", 0)
            new = self.draw(spec, batch.requests)
            view.write(new)
            truth.write(new)
            return
        if isinstance(spec, Paged):
            new = self.draw(spec, sum(batch.lengths))
            view.append(new)
            truth.append(new)
        # Only rows per token may be kept with a loss.
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
        """All requests at once, one alone, and some in any order."""
        some = self.random.sample(range(requests), self.random.randint(1, requests))
        return [range(requests), [self.random.randrange(requests)], some][: 1 + min(requests, 2)]

    def draw(self, spec: StateSpec, rows: int) -> Fields:
        """Random rows [rows, ...] of every field; whole numbers, which every element type holds."""
        return {name: self.numbers(rows, field) for name, field in spec.fields.items()}

    def numbers(self, rows: int, field: Field) -> Tensor:
        """Random whole numbers [rows, *shape] from 1 to `LARGEST`."""
        dtype = getattr(torch, field.dtype or self.oracle.dtype)
        return torch.randint(1, LARGEST + 1, (rows, *field.shape), generator=self.generator).to(dtype)


def unbounded(spec: StateSpec) -> StateSpec:
    """The spec without its window."""
    return dataclasses.replace(spec, window=None) if isinstance(spec, Paged) else spec


def by_position(rows: Rows, place: int) -> dict[int, int]:
    """Where each position of the real rows at `place` stands; raises `LawBroken` where one comes twice."""
    positions = rows.positions[place].tolist()
    real = [True] * len(positions) if rows.key_padding_mask is None else rows.key_padding_mask[place].tolist()
    stands = {position: i for i, position in enumerate(positions) if real[i]}
    require(len(stands) == sum(real), f"a position comes twice among {positions}")
    return stands


@dataclasses.dataclass(frozen=True)
class Reading:
    """One request's share of some rows: its `place` in them, the `first` position that must be shown, and how far a
    number may be off."""

    place: int
    first: int
    error: float


def compare_rows(what: str, seen: Rows, real: Rows, reading: Reading) -> None:
    """Raise `LawBroken` unless `seen` shows every row from the first position on once, and all it shows is true."""
    place = reading.place
    shown, written = by_position(seen, place), by_position(real, place)
    missing = sorted(position for position in written if position >= reading.first and position not in shown)
    require(not missing, f"{what}: positions {missing} are missing")
    extra = sorted(set(shown) - set(written))
    require(not extra, f"{what}: positions {extra} were never written")
    require(set(seen.fields) == set(real.fields), f"{what}: fields {set(seen.fields)}, not {set(real.fields)}")
    for name, rows in seen.fields.items():
        expected = real.fields[name][place, [written[position] for position in shown]]
        require(rows.dtype == expected.dtype, f"{what}: {name} is {rows.dtype}, not {expected.dtype}")
        error = reading.error if rows.dtype.is_floating_point else 0.0
        where = f"{what}: {name} at positions {list(shown)} and what was written"
        require_within(rows[place, list(shown.values())], expected, where, error)
