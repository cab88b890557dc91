from __future__ import annotations

import pytest
from attn_cache import ContiguousCache, PagedCache, SharedCache
from attn_core.states import state_bytes
from attn_core.stores import StoreSize
from hypothesis import given, settings
from hypothesis import strategies as st
from remembered import SPECS, Oracle

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 7), st.integers(1, 6)),
        st.tuples(st.just("release"), st.integers(0, 7), st.integers(0, 1)),
        st.tuples(st.just("step"), st.integers(0, 255), st.integers(1, 30)),
        st.tuples(st.just("poison"), st.integers(0, 255), st.integers(1, 9)),
    ),
    max_size=25,
)


def run(oracle: Oracle, operations: list[tuple[str, int, int]]) -> None:
    for kind, which, amount in operations:
        if kind == "admit" and which not in oracle.running:
            oracle.admit(which, amount)
        elif kind == "release" and which in oracle.running:
            oracle.release(which)
        elif kind in {"step", "poison"}:
            chosen = [name for name in oracle.running if which >> name & 1]
            lengths = {name: 1 + (amount * (name + 1)) % amount if name % 2 else amount for name in chosen}
            granted = {n: k for n, k in lengths.items() if oracle.store.reserve(n, oracle.running[n].context + k)}
            if granted:
                oracle.step(granted, poison=frozenset(granted) if kind == "poison" else frozenset())
            if kind == "poison":
                for name in granted:
                    oracle.release(name)


@pytest.mark.parametrize("family", [ContiguousCache(), PagedCache(), SharedCache()], ids=lambda family: family.name)
@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_a_store_reads_what_was_written_whatever_came_before(family, operations):
    oracle = Oracle(family.create(SPECS, StoreSize(tokens=320, requests=5)))
    run(oracle, operations)
    for name, known in oracle.running.items():
        formula = sum(
            state_bytes(states, tokens=known.context, source=len(known.source), dtype="float32")
            for states in SPECS.values()
        )
        assert oracle.store.live_bytes(name, known.context) == formula
    for name in list(oracle.running):
        oracle.release(name)
    usage = oracle.store.usage()
    assert (usage.tokens, usage.requests) == (0, 0)


@pytest.mark.parametrize("family", [ContiguousCache(), PagedCache(), SharedCache()], ids=lambda family: family.name)
def test_a_freed_store_serves_the_largest_request_again(family):
    oracle = Oracle(family.create(SPECS, StoreSize(tokens=320, requests=5)))
    largest = max(tokens for tokens in range(1, 400) if oracle.store.fits(tokens))
    for round_ in range(3):
        assert oracle.admit(round_, 3)
        assert oracle.store.reserve(round_, largest)
        assert not oracle.store.reserve(round_, largest + 1)
        oracle.step({round_: largest})
        oracle.release(round_)
