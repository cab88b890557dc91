from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from attn_cache import ContiguousCache, PagedCache, SharedCache
from attn_core import Field, Paged, Slot, installed
from attn_core.errors import AlreadyExists, InvalidValue, WrongState
from attn_core.stores import StoreSize
from remembered import SPECS, Oracle, ragged

KV = {"layer": {"kv": Paged({"key": Field((2, 4))})}}
NEAR = {"layer": {"kv": Paged({"key": Field((2, 4))}, window=16)}}
FAMILIES = pytest.mark.parametrize(
    "family", [ContiguousCache(), PagedCache(), SharedCache()], ids=lambda family: family.name
)


def test_both_stores_are_found_by_name():
    assert {"contiguous", "paged"} <= set(installed().caches.names())


@FAMILIES
def test_a_full_store_admits_nobody_and_stays_as_it_was(family):
    oracle = Oracle(family.create(SPECS, StoreSize(tokens=64, requests=2)))
    assert oracle.admit(1, 2)
    assert oracle.admit(2, 4)
    before = oracle.store.usage()
    assert not oracle.store.admit(3)
    assert oracle.store.usage() == before
    oracle.release(1)
    assert oracle.admit(3, 1)


def test_a_reservation_that_does_not_fit_takes_no_page_in_any_window():
    store = PagedCache().create(SPECS, StoreSize(tokens=64, requests=2))
    assert store.admit(1)
    assert store.admit(2)
    assert store.reserve(1, 33)
    before = store.usage()
    assert not store.reserve(2, 17)
    assert store.usage() == before
    assert store.reserve(2, 16)


@FAMILIES
def test_a_step_beyond_the_reservation_is_refused(family):
    store = family.create(KV, StoreSize(tokens=64, requests=1))
    store.admit(1)
    store.reserve(1, 16)
    with pytest.raises(WrongState, match=r"1[67]"):
        store.view(ragged([17], [0]), [1])


@FAMILIES
def test_names_are_checked(family):
    store = family.create(KV, StoreSize(tokens=64, requests=2))
    store.admit(5)
    with pytest.raises(AlreadyExists, match="5"):
        store.admit(5)
    with pytest.raises(InvalidValue, match="request: 6"):
        store.release(6)
    store.release(5)
    with pytest.raises(InvalidValue, match="request: 5"):
        store.reserve(5, 1)


@FAMILIES
def test_wrong_rows_are_refused_with_their_layer_state_and_field(family):
    store = family.create(KV, StoreSize(tokens=64, requests=2))
    store.admit(1)
    store.reserve(1, 3)
    view = store.view(ragged([3], [0]), [1])["layer"]["kv"]
    with pytest.raises(InvalidValue, match=r"layer\.kv\.key.*\(3, 2, 4\)"):
        view.append({"key": torch.zeros(3, 2, 5)})
    with pytest.raises(InvalidValue, match=r"layer\.kv.*key"):
        view.append({"key": torch.zeros(3, 2, 4), "value": torch.zeros(3, 2, 4)})


@FAMILIES
@pytest.mark.parametrize(("tokens", "requests"), [(0, 1), (8, 0)])
def test_an_empty_store_is_refused(family, tokens, requests):
    with pytest.raises(InvalidValue, match="a whole number from 1"):
        family.create(KV, StoreSize(tokens=tokens, requests=requests))


@FAMILIES
def test_a_source_must_be_complete_and_written_before_the_first_step(family):
    store = family.create(SPECS, StoreSize(tokens=64, requests=2))
    store.admit(1)
    store.reserve(1, 1)
    with pytest.raises(WrongState, match="source"):
        store.view(ragged([1], [0]), [1])
    with pytest.raises(InvalidValue, match=r"cross\.source"):
        store.write_source(1, {"cross": {}})
    with pytest.raises(InvalidValue, match=r"cross\.source\.memory"):
        store.write_source(1, {"cross": {"source": {"memory": torch.zeros(2, 4)}}})


@FAMILIES
def test_a_model_without_token_rows_is_never_short_of_tokens(family):
    specs = {"layer": {"sums": Slot({"s": Field((2,))})}}
    store = family.create(specs, StoreSize(tokens=16, requests=1))
    assert store.fits(1000)
    store.admit(1)
    assert store.reserve(1, 1000)
    assert store.usage().tokens == 0


def test_contiguous_rows_of_neighbours_are_read_in_place_and_suit_matrix_products():
    store = ContiguousCache().create(KV, StoreSize(tokens=64, requests=4))
    for name in range(4):
        store.admit(name)
        store.reserve(name, 8)
    store.release(1)
    names = store.order([0, 2, 3])
    batch = ragged([1] * 3, [0] * 3)
    key = store.view(batch, names)["layer"]["kv"].rows(range(3)).fields["key"]
    per_head = key.transpose(1, 2)
    assert per_head.reshape(-1, *per_head.shape[2:]).data_ptr() == key.data_ptr()
    again = store.view(batch, names)["layer"]["kv"].rows(range(3)).fields["key"]
    assert again.data_ptr() == key.data_ptr()


def test_pages_in_a_row_are_read_in_place():
    store = PagedCache().create(KV, StoreSize(tokens=64, requests=1))
    store.admit(1)
    store.reserve(1, 40)
    batch = ragged([40], [0])
    first, second = (store.view(batch, [1])["layer"]["kv"].rows([0]).fields["key"].data_ptr() for _ in range(2))
    assert first == second


def test_pages_behind_the_window_are_freed_for_others():
    store = PagedCache().create(NEAR, StoreSize(tokens=64, requests=2))
    store.admit(1)
    context = 0
    for _ in range(40):
        assert store.reserve(1, context + 16)
        view = store.view(ragged([16], [context]), [1])["layer"]["kv"]
        view.append({"key": torch.full((16, 2, 4), float(context))})
        context += 16
    assert store.usage().tokens <= 48
    assert view.rows([0]).positions.tolist() == [list(range(context - 31, context))]
    store.admit(2)
    assert store.reserve(2, 16)


def test_layers_share_what_a_step_computes():
    store = PagedCache().create(SPECS, StoreSize(tokens=64, requests=2))
    oracle = Oracle(store)
    oracle.admit(1, 2)
    oracle.admit(2, 3)
    for name in (1, 2):
        store.reserve(name, name)
    views = store.view(ragged([1, 2], [0, 0]), [1, 2])
    one, other = (views[layer]["kv"].rows([0, 1]) for layer in ("full", "twin"))
    assert one.positions is other.positions
    assert one.key_padding_mask is other.key_padding_mask


@FAMILIES
@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_what_a_released_request_left_is_never_read_not_even_as_padding(family, leaver):
    oracle = Oracle(family.create(SPECS, StoreSize(tokens=3 * 96, requests=3)))
    for name in range(3):
        oracle.admit(name, 2)
        oracle.store.reserve(name, 60)
    oracle.step({0: 60, 1: 60, 2: 60}, poison=frozenset({leaver}))
    oracle.release(leaver)
    for name in set(range(3)) - {leaver}:
        oracle.release(name)
    lengths = {10: 3, 11: 50, 12: 17}
    for name, length in lengths.items():
        oracle.admit(name, 4)
        oracle.store.reserve(name, length)
    oracle.step(lengths)


@FAMILIES
def test_the_rows_a_leaver_had_beyond_its_successor_are_never_read(family):
    oracle = Oracle(family.create(SPECS, StoreSize(tokens=3 * 96, requests=3)))
    for name, length in {0: 60, 1: 70, 2: 5}.items():
        oracle.admit(name, 2)
        oracle.store.reserve(name, length)
    oracle.step({0: 60, 1: 70, 2: 5}, poison=frozenset({0}))
    oracle.release(0)
    oracle.store.reserve(2, 6)
    oracle.store.reserve(1, 71)
    oracle.step({1: 1, 2: 1})


def test_windows_are_freed_also_for_a_request_that_took_a_leavers_place():
    oracle = Oracle(PagedCache().create(SPECS, StoreSize(tokens=512, requests=2)))
    oracle.admit(1, 1)
    oracle.admit(2, 1)
    for name, length in {1: 1, 2: 200}.items():
        oracle.store.reserve(name, length)
        oracle.step({name: length})
    oracle.release(1)
    pool = oracle.store._kv_cache.pools[20]
    oracle.store.reserve(2, 201)
    assert pool.used_blocks == 2
    oracle.step({2: 1})


@FAMILIES
def test_room_that_is_set_aside_costs_no_memory_until_it_is_used(family):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    store = family.create(KV, StoreSize(tokens=2**23, requests=4))
    assert sum(rows.nbytes for rows in store._kv_cache.memory["layer", "kv"].values()) >= 2**28
    assert resident() - before < 2**26


def test_a_beginning_whose_window_is_gone_is_not_given_to_anybody():
    store = SharedCache().create(NEAR, StoreSize(tokens=128, requests=2))
    tokens = list(range(64))
    store.admit(1)
    for end in range(16, 65, 16):
        store.reserve(1, end)
        store.view(ragged([16], [end - 16]), [1])
    store.reserve(1, 65)
    store.remember(1, tokens, 64, "")
    store.admit(2)
    # Of the rows before token 64 only those of the last block are held; the token after 48 would need others.
    assert store.adopt(2, tokens[:63], "") == 0
    assert store.adopt(2, tokens, "") == 64


def test_remembered_pages_count_as_free():
    store = SharedCache().create(KV, StoreSize(tokens=64, requests=2))
    store.admit(1)
    store.reserve(1, 64)
    store.view(ragged([64], [0]), [1])
    store.remember(1, list(range(64)), 64, "")
    assert store.usage().tokens == 64
    store.release(1)
    assert store.usage().tokens == 0
    store.admit(2)
    assert store.adopt(2, list(range(40)), "") == 32
    assert store.usage().tokens == 32
    assert store.reserve(2, 64)
    assert not store.reserve(2, 65)


def test_remembering_reads_each_token_once_however_many_steps_there_are():
    class Counted(list):
        read = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            Counted.read += len(found) if isinstance(at, slice) else 1
            return found

        def __iter__(self):
            Counted.read += len(self)
            return super().__iter__()

    store = SharedCache().create(KV, StoreSize(tokens=256, requests=2))
    tokens = Counted(range(200))
    store.admit(1)
    for end in range(1, 201):
        store.reserve(1, end)
        store.view(ragged([1], [end - 1]), [1])
        store.remember(1, tokens, end, "")
    assert Counted.read == 192
    store.admit(2)
    assert store.adopt(2, tokens[:100], "") == 96
