"""Stores with requests that are about to leave, and what their bytes say."""

from __future__ import annotations

import json

import torch
from attn_cache import ContiguousCache, PagedCache, SharedCache
from attn_core import Field, Paged, Slot, Source
from attn_core.stores import StoreSize
from remembered import SPECS, Oracle, ragged

PLAIN = [ContiguousCache(), PagedCache(), SharedCache()]
SIZE = StoreSize(tokens=512, requests=4)
SMALL = {
    "near": {"kv": Paged({"key": Field((2, 3))}, window=4)},
    "sums": {"total": Slot({"z": Field((2,))})},
    "cross": {"source": Source({"memory": Field((3,))}, rows=1)},
}


def oracle_of(family, specs=SPECS, size=SIZE, seed=0) -> Oracle:
    return Oracle(family.create(specs, size), seed)


def grow(oracle: Oracle, name: int, *lengths: int) -> None:
    for length in lengths:
        assert oracle.store.reserve(name, oracle.running[name].context + length)
        oracle.step({name: length})


def running(family, *lengths: int) -> Oracle:
    """A store with three requests, of which number 1 was given its rows in chunks of these lengths."""
    oracle = oracle_of(family)
    for name in (0, 1, 2):
        oracle.admit(name, 2 + name)
        grow(oracle, name, 5)
    grow(oracle, 1, *lengths)
    oracle.release(0)
    return oracle


def small_bytes() -> bytes:
    store = PagedCache().create(SMALL, SIZE)
    store.admit(1)
    store.write_source(1, {"cross": {"source": {"memory": torch.ones(1, 3)}}})
    store.reserve(1, 6)
    view = store.view(ragged([6], [0]), [1])
    view["near"]["kv"].append({"key": torch.arange(36.0).view(6, 2, 3)})
    view["sums"]["total"].write({"z": torch.full((1, 2), 3.0)})
    return store.export(1, 6)


def header_of(exported: bytes) -> tuple[int, dict]:
    length = int.from_bytes(exported[:8], "little")
    return 8 + length, json.loads(json.loads(exported[8 : 8 + length])["__metadata__"]["attn_state"])
