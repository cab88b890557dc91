"""Forks and rewinds, against dictionaries that are simply copied."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from attn_cache import ContiguousCache, PagedCache, SharedCache
from attn_core import Field, Paged
from attn_core.errors import AlreadyExists, WrongState
from attn_core.stores import BranchingStore, StoreSize
from hypothesis import given, settings
from hypothesis import strategies as st
from remembered import SPECS, Oracle, Remembered, ragged

FAMILIES = pytest.mark.parametrize(
    "family", [ContiguousCache(), PagedCache(), SharedCache()], ids=lambda family: family.name
)
SIZE = StoreSize(tokens=320, requests=5)


class Branching(Oracle):
    """The oracle with copies: a fork is a deep copy of what its request remembers, a mark another."""

    def __init__(self, store) -> None:
        super().__init__(store)
        self.marks: dict[int, Remembered] = {}

    def grow(self, name: int, rows: int) -> None:
        if self.store.reserve(name, self.running[name].context + rows):
            self.step({name: rows})

    def fork(self, name: int, amount: int) -> None:
        copy, context = amount % 7, self.running[name].context
        if context and copy not in self.running and self.store.fork(name, copy, context):
            self.running[copy] = deepcopy(self.running[name])

    def mark(self, name: int, _: int) -> None:
        self.store.mark(name, self.running[name].context)
        self.marks[name] = deepcopy(self.running[name])

    def rewind(self, name: int, tokens: int) -> None:
        if name not in self.marks:
            return
        marked = self.marks[name]
        tokens = min(max(tokens, marked.context), self.running[name].context)
        assert self.store.rewind(name, tokens) == marked.context, "a fixed state exists only where it was marked"
        self.running[name] = deepcopy(marked)

    def release(self, name: int, _: int = 0) -> None:
        super().release(name)
        self.marks.pop(name, None)

    def poison(self, name: int, rows: int) -> None:
        if self.store.reserve(name, self.running[name].context + rows):
            self.step({name: rows}, poison=frozenset({name}))
            self.release(name)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "grow", "grow", "fork", "fork", "mark", "rewind", "release", "poison"]),
        st.integers(0, 6),
        st.integers(1, 40),
    ),
    max_size=30,
)


@FAMILIES
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_branches_of_a_request_never_see_each_other(family, operations):
    oracle = Branching(family.create(SPECS, SIZE))
    for kind, name, amount in operations:
        if kind == "admit" and name not in oracle.running:
            oracle.admit(name, 1 + amount % 5)
        elif name in oracle.running and kind != "admit":
            getattr(oracle, kind)(name, amount)
    for name in list(oracle.running):
        oracle.grow(name, 1)
        oracle.release(name)
    usage = oracle.store.usage()
    assert (usage.tokens, usage.requests) == (0, 0)


@FAMILIES
def test_rows_per_token_are_rewound_to_any_length(family):
    specs = {"layer": {"kv": Paged({"x": Field((2, 2))}), "near": Paged({"x": Field((3,))}, window=5)}}
    store = family.create(specs, SIZE)
    store.admit(1)
    kept = torch.zeros(0, 2, 2)
    for start, length, left in ((0, 20, 20), (20, 9, 23), (23, 12, 24), (24, 3, 27)):
        store.mark(1, start)
        store.reserve(1, start + length)
        views = store.view(ragged([length], [start]), [1])["layer"]
        rows = torch.randn(length, 2, 2)
        views["kv"].append({"x": rows})
        views["near"].append({"x": torch.ones(length, 3)})
        kept = torch.cat([kept[:start], rows])
        read = views["kv"].rows([0])
        assert torch.equal(read.fields["x"][0], kept)
        assert views["near"].rows([0]).positions[0].tolist() == list(range(max(0, start - 4), start + length))
        assert store.rewind(1, left) == left


def test_forks_share_full_pages_and_copy_only_the_last():
    specs = {"layer": {"kv": Paged({"x": Field((2,))})}}
    store = PagedCache().create(specs, StoreSize(tokens=16 * 8, requests=8))
    store.admit(0)
    store.reserve(0, 16 * 4 + 3)
    store.view(ragged([16 * 4 + 3], [0]), [0])["layer"]["kv"].append({"x": torch.zeros(67, 2)})
    before = store.usage().tokens
    for copy in (1, 2, 3):
        assert store.fork(0, copy, 67)
    assert store.usage().tokens == before + 3 * 16
    assert not store.fork(0, 4, 67)
    assert store.usage().requests == 4
    for name in range(4):
        store.release(name)
    assert store.usage().tokens == 0


@FAMILIES
def test_so_many_requests_are_held_together_as_it_says(family):
    store = family.create({"layer": {"kv": Paged({"x": Field((2,))})}}, SIZE)
    assert isinstance(store, BranchingStore)
    for requests in range(1, 8):
        most = max((n for n in range(1, 400) if store.holds(requests, n)), default=0)
        names = [name for name in range(requests) if store.admit(name)]
        assert (len(names) == requests) == (most > 0)
        if most > 0:
            assert {store.reserve(name, most) for name in names} == {True}
            assert False in {store.reserve(name, most + 1) for name in names}
        for name in names:
            store.release(name)


@FAMILIES
def test_what_cannot_be_forked_or_rewound_is_refused(family):
    store = family.create(SPECS, SIZE)
    store.admit(1)
    store.admit(2)
    with pytest.raises(AlreadyExists, match="2"):
        store.fork(1, 2, 0)
    with pytest.raises(WrongState, match="not marked"):
        store.rewind(1, 0)
    store.mark(1, 5)
    with pytest.raises(WrongState, match="4 tokens"):
        store.rewind(1, 4)


def test_a_fork_of_coded_blocks_reads_what_a_request_alone_would_read():
    from attn_cache import Kivi4Cache, KiviLayout

    specs = {"layer": {"kv": Paged({"key": Field((2, 8)), "value": Field((2, 8))}, window=None)}}
    store = Kivi4Cache(KiviLayout(bits=4, group=8, block=8)).create(specs, SIZE)
    rows = {name: torch.randn(23, 2, 8) for name in ("key", "value")}

    def write(name: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        assert store.reserve(name, stop)
        view = store.view(ragged([stop - start], [start]), [name])["layer"]["kv"]
        view.append({field: tensor[start:stop] for field, tensor in rows.items()})
        return {field: tensor[0] for field, tensor in view.rows([0]).fields.items()}

    for name in (1, 3):
        store.admit(name)
        for start, stop in ((0, 8), (8, 16), (16, 20)):
            write(name, start, stop)
    assert store.fork(1, 2, 20)
    for start in range(20, 23):
        read = [write(name, start, start + 1) for name in (1, 2, 3)]
        assert all(torch.equal(one[field], read[2][field]) for one in read for field in rows)
    for name in (1, 2, 3):
        store.release(name)
    assert store.usage().tokens == 0
