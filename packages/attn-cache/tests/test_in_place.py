"""Rows can be found in memory where a kernel wants to reach them itself."""

from __future__ import annotations

import pytest
import torch
from attn_core import Field, Paged, RaggedBatch, StoreSize, installed

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
                    memory[found.targets] = rows[name]
            for name, memory in found.fields.items():
                assert torch.equal(memory[found.targets], rows[name])
                for request in range(3):
                    handed = view.rows([request])
                    count = contexts[request] + lengths[request] - found.firsts[request]
                    assert handed.positions[0, 0] == found.firsts[request]
                    assert torch.equal(memory[found.numbers[request, :count]], handed.fields[name][0, :count])
        contexts = [context + length for context, length in zip(contexts, lengths, strict=True)]
