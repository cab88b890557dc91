"""Inputs of steps that stay in place say the same as those of steps that are made anew."""

from __future__ import annotations

import random

import pytest
import torch
from attn_core import Field, Paged, RaggedBatch, Slot, Source, installed
from attn_core.errors import NotGraphSafe, WrongState
from attn_core.stores import StoreSize

BLOCK, LONGEST, MOST = 16, 120, 6
KV = {"key": Field((2,)), "value": Field((2,))}
SPECS = {"near": {"kv": Paged(KV, window=20)}, "far": {"kv": Paged(KV)}}


def store_of(cache: str, specs=SPECS):
    """A store in which blocks are scarce enough to be used again."""
    return installed().caches.get(cache).create(specs, StoreSize(tokens=MOST * LONGEST, requests=MOST))


def addresses(store, names: list[int], contexts: list[int]) -> dict[str, tuple[list[int], list[list[int]]]]:
    """Where new rows go and where all rows of each request lie, by layer, as a step made anew says."""
    batch = RaggedBatch.of([1] * len(names), contexts, torch.tensor)
    views, found = store.view(batch, names), {}
    for layer in SPECS:
        rows = views[layer]["kv"].in_place()
        lists = [
            rows.kv_indices[number, : context + 1 - rows.firsts[number]].tolist()
            for number, context in enumerate(contexts)
        ]
        found[layer] = rows.slot_mapping.tolist(), lists
    return found


def static_addresses(store, static, names: list[int], contexts: list[int], padded: int):
    """The same of inputs in place."""
    static.load([7] * len(names), contexts, [1] * len(names), names, padded)
    views, found = static.view(padded, 1), {}
    for layer, states in SPECS.items():
        rows, window = views[layer]["kv"].in_place(), states["kv"].window
        assert rows.contexts.tolist() == [*contexts, *[-1] * (padded + 1 - len(names))]
        assert rows.query_starts.tolist() == [*range(len(names)), *[len(names)] * (padded + 1 - len(names)), padded]
        lists = []
        for number, context in enumerate(contexts):
            first = 0 if window is None else max(0, context + 1 - window)
            places = torch.arange(first, context + 1)
            lists.append((rows.kv_indices[number, places // BLOCK] * BLOCK + places % BLOCK).tolist())
        found[layer] = rows.slot_mapping[: len(names)].tolist(), lists
        spare = rows.slot_mapping[len(names) :].tolist()
        taken = {row for one in lists for row in one}
        assert not taken & set(spare)
        assert all(row >= BLOCK for row in spare), "row 0 is what padding of other steps reads"
    return found


@pytest.mark.parametrize("cache", ["paged", "shared"])
@pytest.mark.parametrize("seed", range(3))
def test_addresses_in_place_are_those_of_a_step_made_anew(cache, seed):
    rng = random.Random(seed)
    store = store_of(cache)
    static = store.static_step(MOST, MOST, LONGEST)
    lengths: dict[int, int] = {}
    steps = 0
    for number in range(200):
        if len(lengths) < MOST and rng.random() < 0.2:
            assert store.admit(number)
            lengths[number] = 0
        if lengths and rng.random() < 0.1:
            name = rng.choice(list(lengths))
            store.release(name)
            del lengths[name]
        if 0 < len(lengths) < MOST and rng.random() < 0.1:
            name = rng.choice(list(lengths))
            if store.fork(name, 1000 + number, lengths[name]):
                lengths[1000 + number] = lengths[name]
        going = [name for name, length in lengths.items() if length < LONGEST - 1 and rng.random() < 0.8]
        names = [name for name in store.order(going) if store.reserve(name, lengths[name] + 1)]
        if not names:
            continue
        contexts = [lengths[name] for name in names]
        padded = rng.randint(len(names), MOST)
        expected = addresses(store, names, contexts)
        assert static_addresses(store, static, names, contexts, padded) == expected
        assert static.tokens(padded).tolist() == [7] * len(names) + [0] * (padded - len(names))
        for name in names:
            lengths[name] += 1
        steps += 1
    assert steps > 100


def test_tokens_of_the_last_step_are_taken_from_its_rows_and_negative_ones_are_the_first_token():
    store = store_of("paged")
    static = store.static_step(MOST, MOST, LONGEST)
    for name in (1, 2, 3):
        assert store.admit(name)
        assert store.reserve(name, 2)
    static.load([4, 5, 6], [0, 0, 0], [1, 1, 1], [1, 2, 3], 4)
    static.load([2, 0, 3], [1, 1, 1], [1, 1, 1], [1, 2, 3], 4, torch.tensor([40, 41, 42, -1]))
    assert static.tokens(4).tolist() == [42, 40, 0, 0]


def test_tokens_of_chunks_are_taken_from_the_last_step_too():
    store = store_of("paged")
    static = store.static_step(8, 2, LONGEST)
    for name in (1, 2):
        assert store.admit(name)
        assert store.reserve(name, 4)
    static.load([2, 0, 3], [0, 0], [2, 1], [1, 2], 8, torch.tensor([40, 41, 42, -1]))
    assert static.tokens(8).tolist() == [42, 40, 0, *[0] * 5]
    rows = static.view(8, 8)["far"]["kv"].in_place()
    assert (rows.query_starts.tolist(), rows.contexts.tolist()) == ([0, 2, 3, 8], [0, 0, -1])
    assert static.batch(8, 8).positions.tolist() == [0, 1, *[0] * 6]


def test_a_position_that_is_not_reserved_is_refused():
    store = store_of("paged")
    static = store.static_step(MOST, MOST, LONGEST)
    assert store.admit(1)
    assert store.reserve(1, 5)
    with pytest.raises(WrongState, match="are reserved"):
        static.load([1], [BLOCK], [1], [1], 1)


@pytest.mark.parametrize("cache", ["paged", "shared"])
def test_states_of_fixed_size_are_read_and_written_in_place_and_padding_touches_nobodys(cache):
    """Every request counts its own steps, through joining, leaving and forking."""
    rng, store = random.Random(0), store_of(cache, {"deep": {"sum": Slot({"s": Field((3,))})}})
    static = store.static_step(MOST, MOST, LONGEST)
    views = {size: static.view(size, 1)["deep"]["sum"] for size in range(1, MOST + 1)}
    counts: dict[int, int] = {}
    for number in range(300):
        if len(counts) < MOST and rng.random() < 0.3:
            assert store.admit(number)
            counts[number] = 0
        if counts and rng.random() < 0.1:
            gone = rng.choice(list(counts))
            store.release(gone)
            del counts[gone]
        if 0 < len(counts) < MOST and rng.random() < 0.1:
            like = rng.choice(list(counts))
            assert store.fork(like, 1000 + number, counts[like])
            counts[1000 + number] = counts[like]
        names = store.order([name for name in counts if rng.random() < 0.7])
        if not all(store.reserve(name, counts[name] + 1) for name in names) or not names:
            continue
        padded = rng.randint(len(names), MOST)
        static.load([7] * len(names), [counts[name] for name in names], [1] * len(names), names, padded)
        held = views[padded].read()["s"]
        assert held[: len(names)].tolist() == [[counts[name]] * 3 for name in names]
        views[padded].write({"s": torch.cat([held[: len(names)] + 1, torch.full((padded - len(names), 3), torch.nan)])})
        for name in names:
            counts[name] += 1
    assert max(counts.values()) > 20
    with pytest.raises(NotGraphSafe, match="states of fixed size"):
        static.view(MOST, MOST)


@pytest.mark.parametrize("spec", [Source(KV)], ids=["source"])
def test_states_that_are_no_rows_in_blocks_are_named(spec):
    store = store_of("paged", {"deep": {"state": spec}, "far": {"kv": Paged(KV)}})
    with pytest.raises(NotGraphSafe, match="deep"):
        store.static_step(MOST, MOST, LONGEST)


def test_a_cache_without_blocks_says_so():
    with pytest.raises(NotGraphSafe, match="blocks"):
        store_of("contiguous").static_step(MOST, MOST, LONGEST)
