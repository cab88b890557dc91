"""A request's state leaves a store as bytes and goes on elsewhere as if it had never moved."""

from __future__ import annotations

import dataclasses
from copy import deepcopy

import pytest
import torch
from attn_cache import Int4Cache, Int8Cache, PagedCache, SharedCache
from attn_core import Field, Paged, Slot
from attn_core.errors import StateInvalid
from attn_core.stores import StoreSize
from leaving import PLAIN, SIZE, grow, header_of, oracle_of, running, small_bytes
from remembered import SPECS, WINDOW, ragged
from safetensors.torch import load

FAMILIES = pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
TARGETS = pytest.mark.parametrize("target", PLAIN, ids=lambda family: family.name)


@FAMILIES
@TARGETS
@pytest.mark.parametrize("lengths", [(1,), (27,), (26, 17, 1, 40)], ids=str)
def test_a_restored_request_is_read_as_if_it_had_never_moved(family, target, lengths):
    here, there = running(family, *lengths), oracle_of(target, seed=5)
    there.admit(7, 3)
    grow(there, 7, 33)
    exported = here.store.export(1, here.running[1].context)
    assert there.store.restore(1, exported) == here.running[1].context
    there.running[1] = deepcopy(here.running[1])
    for oracle in (here, there):
        grow(oracle, 1, 1, 20, 3)
        other = next(name for name in oracle.running if name != 1)
        oracle.store.reserve(other, oracle.running[other].context + 2)
        oracle.store.reserve(1, oracle.running[1].context + 1)
        oracle.step({1: 1, other: 2})


def test_equal_states_have_equal_bytes_whatever_store_wrote_them_and_however_often():
    written = set()
    for family in PLAIN:
        oracle = running(family, 27, 9)
        written |= {oracle.store.export(1, oracle.running[1].context) for _ in range(3)}
    assert len(written) == 1


@FAMILIES
@pytest.mark.parametrize("tokens", [6, 19, 20, 70])
def test_the_bytes_are_those_of_the_formula_and_the_header(family, tokens):
    oracle = running(family, tokens - 5)
    exported = oracle.store.export(1, tokens)
    # The oldest row of a window is out of sight for the next token.
    seen = {**SPECS, "near": {"kv": dataclasses.replace(SPECS["near"]["kv"], window=WINDOW - 1)}}
    formula = family.bytes(seen, tokens=tokens, source=3, dtype="float32")
    assert len(exported) - header_of(exported)[0] == formula


def test_the_bytes_are_a_safetensors_file_with_the_rows_by_name():
    rows = load(small_bytes())
    assert rows.keys() == {"near/kv/key", "sums/total/z", "cross/source/memory"}
    assert torch.equal(rows["near/kv/key"], torch.arange(18.0, 36.0).view(3, 2, 3))
    assert rows["sums/total/z"].tolist() == [3, 3]


def test_a_restored_window_takes_only_the_pages_it_sees():
    near = {"layer": {"kv": Paged({"key": Field((2,))}, window=8)}}
    store, other = (PagedCache().create(near, StoreSize(tokens=160, requests=1)) for _ in range(2))
    store.admit(1)
    store.reserve(1, 100)
    store.view(ragged([100], [0]), [1])["layer"]["kv"].append({"key": torch.zeros(100, 2)})
    other.restore(1, store.export(1, 100))
    # Rows 93 to 99: of pages 5 and 6.
    assert other.usage().tokens == 32


def test_what_was_restored_can_be_remembered_for_others():
    tokens = list(range(65))
    no_slot = {name: SPECS[name] for name in ("full", "near")}
    store = SharedCache().create(no_slot, SIZE)
    first = PagedCache().create(no_slot, SIZE)
    first.admit(1)
    first.reserve(1, 32)
    view = first.view(ragged([32], [0]), [1])
    key = torch.randn(32, 2, 3)
    view["full"]["kv"].append({"key": key, "value": torch.zeros(32, 2, 5)})
    view["near"]["kv"].append({"x": torch.zeros(32, 4, dtype=torch.float64)})
    store.restore(1, first.export(1, 32))
    store.remember(1, tokens, 32, "")
    store.release(1)
    store.admit(2)
    assert store.adopt(2, tokens, "") == 32
    store.reserve(2, 33)
    read = store.view(ragged([1], [32]), [2])["full"]["kv"].rows([0])
    assert torch.equal(read.fields["key"][0, :32], key)


@pytest.mark.parametrize("family", [Int8Cache(), Int4Cache()], ids=lambda family: family.name)
def test_codes_move_with_the_same_bits_and_only_to_a_store_of_the_same_codes(family):
    specs = {"layer": {"kv": Paged({"key": Field((2, 8))}), "sums": Slot({"z": Field((2,))})}}
    here, there = (family.create(specs, SIZE) for _ in range(2))
    here.admit(1)
    here.reserve(1, 21)
    here.view(ragged([21], [0]), [1])["layer"]["kv"].append({"key": torch.randn(21, 2, 8)})
    exported = here.export(1, 21)
    formula = family.bytes(specs, tokens=21, dtype="float32")
    assert len(exported) - header_of(exported)[0] == formula == here.live_bytes(1, 21)
    there.restore(4, exported)
    read = []
    for store, name in ((here, 1), (there, 4)):
        store.reserve(name, 22)
        read.append(store.view(ragged([1], [21]), [name])["layer"]["kv"].rows([0]).fields["key"][0, :21])
    assert torch.equal(*read)
    with pytest.raises(StateInvalid, match="layer/kv"):
        SharedCache().create(specs, SIZE).restore(1, exported)


@FAMILIES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_rows_of_every_element_type_move_with_the_same_bits(family, dtype):
    specs, size = {"layer": {"kv": Paged({"key": Field((3,))})}}, dataclasses.replace(SIZE, dtype=dtype)
    here, there = (family.create(specs, size) for _ in range(2))
    rows = torch.randn(18, 3).to(getattr(torch, dtype))
    rows[0, 0] = torch.nan
    here.admit(1)
    here.reserve(1, 18)
    here.view(ragged([18], [0]), [1])["layer"]["kv"].append({"key": rows})
    there.restore(1, here.export(1, 18))
    there.reserve(1, 19)
    read = there.view(ragged([1], [18]), [1])["layer"]["kv"].rows([0]).fields["key"][0, :18]
    assert torch.equal(read.view(torch.uint8), rows.view(torch.uint8))
