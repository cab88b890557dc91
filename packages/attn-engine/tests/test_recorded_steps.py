"""Decode steps over inputs in place give the tokens of steps made anew, whoever joins, leaves, waits or is cached.

The very steps that a GPU repeats are computed here on the CPU, in float64.
"""

from __future__ import annotations

import pytest
import torch
from attn_engine.graphs import DECODE, Rerun, StepGraphs, StepLimits
from serving import assert_empty, make_engine, run, some_requests
from small_models import InPlace, Linear, SmallModel, Softmax

KINDS = {
    "slot": lambda: (Linear(), Linear()),
    "hybrid": lambda: (Linear(), InPlace(), Linear()),
    "window": lambda: (Linear(), InPlace(window=7), InPlace()),
    "gathered": lambda: (Softmax(window=7), InPlace(), Softmax(window=17)),
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def model_of(kind: str) -> SmallModel:
    torch.manual_seed(7)
    return SmallModel(*KINDS[kind]()).double().eval()


def recorded(model, **options):
    """An engine that repeats decode steps, and what they are repeated by."""
    engine = make_engine(model, **options)
    graphs = engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(0, 8))
    return engine, graphs


def ids_of(outcomes):
    return {name: outcome.ids for name, outcome in outcomes.items()}


@EVERY_KIND
@pytest.mark.parametrize("cache", ["paged", "shared"])
@pytest.mark.parametrize("every", [0, 3], ids=["a crowd", "joining one by one"])
def test_repeated_steps_give_the_tokens_of_steps_made_anew(kind, cache, every):
    model = model_of(kind)
    requests = some_requests(model, 10, seed=2)
    expected = ids_of(run(make_engine(model, cache), requests))
    engine, graphs = recorded(model, cache=cache, requests=6, max_num_batched_tokens=40)
    assert ids_of(run(engine, requests, every=every)) == expected
    assert not graphs.reasons
    assert graphs.replayed[DECODE] > 10
    assert_empty(engine)


@pytest.mark.parametrize("kind", ["hybrid", "window", "gathered"])
def test_preemption_between_repeated_steps_changes_nothing(kind):
    model = model_of(kind)
    requests = some_requests(model, 12, seed=1)
    expected = ids_of(run(make_engine(model, "paged"), requests))
    engine, graphs = recorded(model, cache="paged", tokens=96, max_num_batched_tokens=40)
    assert ids_of(run(engine, requests)) == expected
    assert engine.stats().preemptions > 0
    assert graphs.replayed[DECODE] > 10
    assert_empty(engine)


@EVERY_KIND
def test_states_found_cached_go_on_in_repeated_steps(kind):
    model = model_of(kind)
    first, *others = some_requests(model, 4, seed=3)
    prompt = tuple(range(40))
    requests = [type(r)(id=r.id, token_ids=(*prompt, *r.token_ids[:5]), params=r.params) for r in (first, *others)]
    expected = {r.id: run(make_engine(model, "paged"), [r])[r.id].ids for r in requests}
    engine, graphs = recorded(model, cache="shared")
    found = {}
    for request in requests:
        found |= ids_of(run(engine, [request]))
    assert found == expected
    assert engine.stats().cached_tokens > 0
    assert graphs.replayed[DECODE] > 10
    assert_empty(engine)


@EVERY_KIND
def test_recording_leaves_the_states_of_running_requests_alone(kind):
    """Sizes are first met, and recorded, while others are in the middle of their text."""
    model = model_of(kind)
    requests = some_requests(model, 8, seed=4)
    expected = {r.id: run(make_engine(model, "paged"), [r])[r.id].ids for r in requests}
    engine, graphs = recorded(model, cache="paged")
    assert ids_of(run(engine, requests, every=2)) == expected
    assert len(graphs._graphs) > 2
