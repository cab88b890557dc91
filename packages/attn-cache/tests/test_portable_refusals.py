"""Bytes that are no state of the store, or find no room in it, are refused and nothing has changed."""

from __future__ import annotations

import dataclasses
import json
from copy import deepcopy

import pytest
import torch
from attn_cache import PagedCache
from attn_cache.portable import StateLayout, pack
from attn_core import Field, Paged, Slot, Source, installed
from attn_core.errors import AlreadyExists, Incompatible, InvalidValue, OutOfCapacity, StateInvalid, WrongState
from attn_core.stores import PortableStore, StoreSize
from leaving import PLAIN, SIZE, SMALL, grow, oracle_of, running, small_bytes
from remembered import SPECS
from safetensors.torch import load

FAMILIES = pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)


@FAMILIES
def test_no_cut_and_no_changed_byte_is_ever_taken_for_a_state(family):
    exported, store = small_bytes(), family.create(SMALL, SIZE)
    before = store.usage()
    damaged = [exported[:length] for length in range(0, len(exported), 3)] + [exported + b"\0"]
    damaged += [exported[:i] + bytes([byte ^ 1 << i % 8]) + exported[i + 1 :] for i, byte in enumerate(exported)]
    for given in damaged:
        with pytest.raises(StateInvalid, match=r"exported state: \w+"):
            store.restore(1, given)
    assert store.usage() == before
    assert store.restore(1, exported) == 6


@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ({**SMALL, "near": {"kv": Paged({"key": Field((2, 3))}, window=5)}}, r"near/kv.*4.*5"),
        ({**SMALL, "near": {"kv": Paged({"key": Field((2, 4))}, window=4)}}, r"near/kv.*\[2, 3\].*\[2, 4\]"),
        ({**SMALL, "near": {"kv": Paged({"key": Field((2, 3), "float16")}, window=4)}}, r"near/kv.*float32.*float16"),
        ({**SMALL, "sums": {"total": Source({"z": Field((2,))})}}, r"sums/total.*slot.*source"),
        ({**SMALL, "more": {"total": Slot({"z": Field((2,))})}}, r"more/total: absent"),
        ({key: SMALL[key] for key in ("near", "sums")}, r"cross/source.*expected: absent"),
    ],
)
def test_the_state_of_another_model_is_refused_by_the_state_that_differs(specs, named):
    with pytest.raises(StateInvalid, match=named):
        PagedCache().create(specs, SIZE).restore(1, small_bytes())


def test_another_element_type_is_refused_by_name():
    store = PagedCache().create(SMALL, dataclasses.replace(SIZE, dtype="bfloat16"))
    with pytest.raises(StateInvalid, match=r"dtype: float32; expected: bfloat16"):
        store.restore(1, small_bytes())


@pytest.mark.parametrize("other", [1, 3])
def test_another_version_is_refused_by_name_before_anything_else_is_read(other):
    newer = small_bytes().replace(b'\\"version\\":2', f'\\"version\\":{other}'.encode())
    with pytest.raises(StateInvalid, match=rf"version: {other}; expected: 2"):
        PagedCache().create({}, SIZE).restore(1, newer)


def forged(change) -> bytes:
    """Bytes with a right hash over what `change` does to the layout, the tokens and the rows."""
    layout = StateLayout(SMALL, "float32")
    rows = {tuple(name.split("/")): tensor for name, tensor in load(small_bytes()).items()}
    tokens = change(layout, rows)
    return pack(layout, 6 if tokens is None else tokens, rows)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda layout, rows: -1, "tokens: -1"),
        (lambda layout, rows: True, "tokens: True"),
        (lambda layout, rows: 2, r"near/kv/key: torch.float32 \(3, 2, 3\); expected: torch.float32 \(2, 2, 3\)"),
        (lambda layout, rows: rows.__delitem__(("sums", "total", "z")), "sums/total/z: is missing"),
        (lambda layout, rows: rows.update({("x", "y", "z"): torch.zeros(1)}), "x/y/z"),
        (lambda layout, rows: rows.update({("sums", "total", "z"): torch.zeros(())}), r"sums/total/z.*\(\)"),
        (lambda layout, rows: rows.update({("cross", "source", "memory"): torch.zeros(2, 3)}), "cross/source/memory"),
        (lambda layout, rows: setattr(layout, "fingerprint", "0" * 64), "fingerprint"),
        (lambda layout, rows: setattr(layout, "states", [[]]), "near/kv|cross/source"),
    ],
)
def test_bytes_that_contradict_themselves_are_refused_though_their_hash_is_right(change, named):
    store = PagedCache().create(SMALL, SIZE)
    with pytest.raises(StateInvalid, match=named):
        store.restore(1, forged(change))
    assert store.usage().requests == 0


@pytest.mark.parametrize("given", [None, "text", bytearray(9), 3])
def test_only_bytes_are_read(given):
    with pytest.raises(InvalidValue, match="exported"):
        PagedCache().create(SMALL, SIZE).restore(1, given)


@pytest.mark.parametrize("inner", ["[]", "[" * 100_000, "{", '"text"', "\\ud800"])
def test_a_header_that_is_no_object_is_refused(inner):
    text = json.dumps({"__metadata__": {"attn_state": inner}}).encode()
    with pytest.raises(StateInvalid, match="header"):
        PagedCache().create(SMALL, SIZE).restore(1, len(text).to_bytes(8, "little") + text)


@FAMILIES
def test_without_room_a_request_is_refused_and_can_come_when_there_is_some(family):
    here = running(family, 60)
    exported = here.store.export(1, 65)
    there = oracle_of(family, size=StoreSize(tokens=160, requests=2))
    there.admit(3, 1)
    grow(there, 3, 10)
    there.admit(4, 1)
    grow(there, 4, 70)
    before = there.store.usage()
    with pytest.raises(AlreadyExists, match="3"):
        there.store.restore(3, exported)
    with pytest.raises(OutOfCapacity, match="full with 2 requests"):
        there.store.restore(1, exported)
    assert there.store.usage() == before
    grow(there, 3, 1)
    there.release(4)
    assert there.store.restore(1, exported) == 65
    there.running[1] = deepcopy(here.running[1])
    grow(there, 1, 1)
    for name in (1, 3):
        there.release(name)
    assert (there.store.usage().tokens, there.store.usage().requests) == (0, 0)


@pytest.mark.parametrize("family", PLAIN[1:], ids=lambda family: family.name)
def test_too_few_pages_are_said_to_be_short_now_and_none_is_taken(family):
    exported = running(family, 60).store.export(1, 65)
    there = oracle_of(family, size=StoreSize(tokens=160, requests=3))
    there.admit(3, 1)
    grow(there, 3, 90)
    before = there.store.usage()
    with pytest.raises(OutOfCapacity, match="65 tokens"):
        there.store.restore(1, exported)
    assert there.store.usage() == before
    grow(there, 3, 60)


@FAMILIES
def test_a_request_longer_than_the_store_is_said_never_to_fit(family):
    exported = running(family, 60).store.export(1, 65)
    with pytest.raises(Incompatible, match="65 tokens never"):
        family.create(SPECS, StoreSize(tokens=48, requests=1)).restore(1, exported)


@FAMILIES
def test_what_is_not_there_cannot_be_exported(family):
    oracle = running(family, 3)
    store = oracle.store
    assert isinstance(store, PortableStore)
    with pytest.raises(WrongState, match="9 tokens"):
        store.export(1, 9)
    with pytest.raises(InvalidValue, match="request: 6"):
        store.export(6, 0)
    for tokens in (-1, 1.0, True):
        with pytest.raises(InvalidValue, match="tokens"):
            store.export(1, tokens)
    store.admit(6)
    with pytest.raises(WrongState, match="source"):
        store.export(6, 0)


@pytest.mark.parametrize("name", installed().caches.names())
def test_a_family_says_whether_its_requests_can_leave(name):
    family = installed().caches.get(name)
    assert family.portable == isinstance(family.create(SMALL, SIZE), PortableStore)
