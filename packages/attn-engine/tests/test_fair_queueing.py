"""Tenants are served by their weights, and no request waits for ever."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams
from attn_engine.scheduler import VirtualTokenCounter
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import LETTERS, small_model

MODEL = small_model("paged")
COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=200)


def engine_of(requests: int = 1, **shares: float) -> Engine:
    size = StoreSize(tokens=96 * requests, requests=requests, dtype="float64")
    store = installed().caches.get("paged").create(MODEL.state_specs(), size)
    return Engine(MODEL, store, LETTERS, EngineConfig(tenant_weights=shares))


def asked(name: str, tenant: str, priority: int = 0, new: int = 4) -> Request:
    task = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return Request(id=name, token_ids=(1, 2, 3), params=task, tenant=tenant, priority=priority, scope=None)


def ends(engine: Engine) -> list[str]:
    order = []
    while not engine.idle:
        order += [event.request_id for event in engine.step() if event.ended]
    return order


@given(costs=COSTS, weights=st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=2))
def test_tenants_who_always_wait_never_drift_apart_by_more_than_the_largest_request(costs, weights):
    shares = VirtualTokenCounter(weights)
    given_to = dict.fromkeys(weights, 0.0)
    for cost in costs:
        shares.update_active(weights)
        next_ = min(weights, key=shares.served)
        shares.charge(next_, cost)
        given_to[next_] += cost / weights[next_]
        assert max(given_to.values()) - min(given_to.values()) <= 50 / min(weights.values()) + 1e-6


@given(costs=COSTS, later=COSTS)
def test_who_was_idle_saves_nothing_up_and_who_was_greedy_owes_it_when_coming_back(costs, later):
    shares = VirtualTokenCounter({})
    shares.update_active(["busy"])
    for cost in costs:
        shares.charge("busy", cost)
    shares.update_active(["busy", "idle"])
    assert shares.served("idle") == shares.served("busy")
    for cost in later:
        shares.charge("busy", cost)
    shares.update_active(["idle"])
    shares.update_active(["idle", "busy"])
    assert shares.served("busy") - shares.served("idle") == sum(later)


@settings(max_examples=15, deadline=None)
@given(flood=st.integers(3, 9), places=st.integers(1, 2), before=st.integers(0, 4))
def test_a_single_request_waits_for_no_more_than_one_of_a_flood_once_a_place_is_free(flood, places, before):
    engine = engine_of(places)
    for number in range(flood):
        engine.submit(asked(f"flood{number}", "loud"))
    order = []
    for _ in range(before):
        order += [event.request_id for event in engine.step() if event.ended]
    engine.submit(asked("quiet", "calm"))
    running = engine.stats().running
    # However many come after it, those that run already and one that waited longer go first.
    for number in range(flood, 2 * flood):
        engine.submit(asked(f"flood{number}", "loud"))
    done = len(order)
    order += ends(engine)
    assert order.index("quiet") - done <= running + places
    assert len(order) == 2 * flood + 1


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much():
    engine = engine_of(rich=2.0)
    for number in range(12):
        engine.submit(asked(f"rich{number}", "rich"))
        engine.submit(asked(f"poor{number}", "poor"))
    first = ends(engine)[:12]
    assert sum(name.startswith("rich") for name in first) == 8


def test_priority_goes_before_fairness():
    engine = engine_of()
    for number in range(4):
        engine.submit(asked(f"urgent{number}", "loud", priority=1))
        engine.submit(asked(f"calm{number}", "calm"))
    assert [name[:-1] for name in ends(engine)] == ["urgent"] * 4 + ["calm"] * 4


def calls_of_a_step(waiting: int) -> Counter[str]:
    """The functions of ours that scheduling a step calls, where so many requests of two tenants wait."""
    engine = engine_of(8)
    for number in range(waiting):
        engine.submit(asked(f"{number}", ("ann", "bob")[number % 2], new=1))
    found: Counter[str] = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_globals["__name__"].startswith("attn_"):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        assert len(engine._scheduler.schedule()) == 8
    finally:
        sys.setprofile(None)
    return found


def test_a_step_costs_no_more_calls_where_a_thousand_wait_than_where_twenty_do():
    calls_of_a_step(20)  # what is imported or computed once is so by now
    assert calls_of_a_step(1000) == calls_of_a_step(20)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(weight):
    with pytest.raises(InvalidValue, match="tenant_weights"):
        EngineConfig(tenant_weights={"ann": weight})
