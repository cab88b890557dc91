"""Rows can be found in memory where a kernel wants to reach them itself."""

from __future__ import annotations

import pytest
import torch
from attn_core import Field, Paged, RaggedBatch, Slot, installed
from attn_core.stores import StoreSize

SPECS = {
    "far": {"kv": Paged({"key": Field((2, 4)), "value": Field((2, 4))})},
    "near": {"kv": Paged({"key": Field((2, 4)), "value": Field((2, 4))}, window=6)},
}


@pytest.mark.parametrize("cache", ["paged", "shared", "contiguous"])
def test_rows_in_place_are_the_rows_that_are_handed_out(cache):
    torch.manual_seed(0)
    store = installed().caches.get(cache).create(SPECS, StoreSize(tokens=512, requests=4))
    for request in range(3):
        assert store.admit(request)
    contexts = [0, 0, 0]
    for lengths in ([5, 1, 17], [1, 1, 1], [20, 3, 1], [1, 1, 1], [1, 30, 2]):
        for request in range(3):
            assert store.reserve(request, contexts[request] + lengths[request])
        batch = RaggedBatch.of(lengths, contexts, torch.tensor)
        state = store.view(batch, [0, 1, 2])
        for layer in SPECS:
            view = state[layer]["kv"]
            rows = {name: torch.randn(sum(lengths), 2, 4) for name in ("key", "value")}
            found = view.in_place()
            if layer == "far":
                view.append(rows)
            else:
                for name, memory in found.fields.items():
                    memory[found.slot_mapping] = rows[name]
            for name, memory in found.fields.items():
                assert torch.equal(memory[found.slot_mapping], rows[name])
                for request in range(3):
                    handed = view.rows([request])
                    count = contexts[request] + lengths[request] - found.firsts[request]
                    assert handed.positions[0, 0] == found.firsts[request]
                    assert torch.equal(memory[found.kv_indices[request, :count]], handed.fields[name][0, :count])
        contexts = [context + length for context, length in zip(contexts, lengths, strict=True)]


@pytest.mark.parametrize("cache", ["float16", "int8", "int4"])
def test_codes_in_place_stand_for_the_rows_that_are_handed_out(cache):
    torch.manual_seed(0)
    specs = {"layer": {"kv": Paged({"key": Field((2, 64)), "value": Field((2, 32))}, window=9)}}
    store = installed().caches.get(cache).create(specs, StoreSize(tokens=512, requests=1))
    assert store.admit(0)
    assert store.reserve(0, 40)
    batch = RaggedBatch.of([40], [0], torch.tensor)
    view = store.view(batch, [0])["layer"]["kv"]
    view.append({"key": torch.randn(40, 2, 64), "value": torch.randn(40, 2, 32)})
    found, handed = view.coded_in_place(), view.rows([0])
    assert found.form == cache
    for name, rows in handed.fields.items():
        parts = {part: memory[found.kv_indices[0]] for part, memory in found.fields.items() if part.startswith(name)}
        codes = parts[f"{name}.codes"]
        if cache == "float16":
            numbers = codes.float()
        elif cache == "int8":
            numbers = codes * parts[f"{name}.scale"].float()[..., None]
        else:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float().unflatten(-1, (-1, 32))
            numbers = (codes * parts[f"{name}.step"][..., None] + parts[f"{name}.low"][..., None]).flatten(-2)
        torch.testing.assert_close(numbers, rows[0])


def test_codes_of_a_state_that_keeps_a_field_as_it_is_are_not_shown():
    specs = {"layer": {"kv": Paged({"key": Field((2, 64)), "short": Field((2, 2))})}}
    store = installed().caches.get("int8").create(specs, StoreSize(tokens=64, requests=1))
    assert store.admit(0)
    assert store.reserve(0, 3)
    view = store.view(RaggedBatch.of([3], [0], torch.tensor), [0])["layer"]["kv"]
    view.append({"key": torch.randn(3, 2, 64), "short": torch.randn(3, 2, 2)})
    assert view.coded_in_place() is None


@pytest.mark.parametrize("cache", ["paged", "shared", "contiguous"])
def test_states_of_fixed_size_in_place_are_those_that_are_handed_out(cache):
    torch.manual_seed(0)
    specs = {"layer": {"memory": Slot({"S": Field((2, 3, 4), dtype="float32"), "tail": Field((3, 5))})}}
    store = installed().caches.get(cache).create(specs, StoreSize(tokens=512, requests=4, dtype="bfloat16"))
    for request in range(3):
        assert store.admit(request)
    batch = RaggedBatch.of([1, 1, 1], [0, 0, 0], torch.tensor)
    view = store.view(batch, [2, 0, 1])["layer"]["memory"]
    given = {"S": torch.randn(3, 2, 3, 4), "tail": torch.randn(3, 3, 5).bfloat16()}
    view.write(given)
    found = view.in_place()
    assert found.slots.dtype == torch.int64
    for name, memory in found.fields.items():
        assert memory.shape[1:] == given[name].shape[1:]
        assert torch.equal(memory[found.slots], given[name])
        memory[found.slots[1]] += 1
        assert torch.equal(view.read()[name][1], given[name][1] + 1)
        assert torch.equal(store.view(batch, [0, 1, 2])["layer"]["memory"].read()[name][0], given[name][1] + 1)


def test_padding_of_a_static_step_has_a_slot_that_no_request_has():
    specs = {"layer": {"memory": Slot({"S": Field((2,))})}}
    store = installed().caches.get("paged").create(specs, StoreSize(tokens=64, requests=3))
    for request in range(2):
        assert store.admit(request)
        assert store.reserve(request, 2)
    static = store.static_step(3, 3, 64)
    static.load([0, 0], [0, 0], [1, 1], [1, 0], 3)
    found = static.view(3, 1)["layer"]["memory"].in_place()
    assert found.slots.tolist() == [1, 0, 3]
    assert len(found.fields["S"]) == 4
    address = found.slots.data_ptr()
    static.load([0], [1], [1], [0], 3)
    assert found.slots.tolist() == [0, 3, 3]
    assert static.view(3, 1)["layer"]["memory"].in_place().slots.data_ptr() == address
