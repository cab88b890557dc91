"""A request that had to leave may come back with its states, and nobody can tell but by the work that was saved."""

from __future__ import annotations

import pytest
from attn_cache import KiviCache, KiviLayout, SharedCache
from attn_cache.prefix_cache import SharedStore
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_core.stores import StoreSize
from attn_engine import Beams, Engine, EngineLimits, Request, Sampling, Scoring
from serving import assert_empty, make_engine, run, run_all, some_requests
from small_models import KINDS, LETTERS, small_model

ROOM = 1 << 24


def crowded(model, cache="paged", offload_bytes=ROOM, tokens=96, requests=8) -> Engine:
    family = installed().caches.get(cache) if isinstance(cache, str) else cache
    store = family.create(model.state_specs(), StoreSize(tokens=tokens, requests=requests, dtype="float64"))
    return Engine(model, store, LETTERS, EngineLimits(step_tokens=40, offload_bytes=offload_bytes))


def ids_of(outcomes) -> dict:
    return {name: outcome.ids for name, outcome in outcomes.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "slot"])
@pytest.mark.parametrize("cache", ["paged", "shared", "int8"])
def test_reloading_changes_no_token_and_computes_less_than_recomputing(kind, cache):
    model = small_model(kind)
    requests = some_requests(model, count=12, seed=1)
    roomy, recomputing, reloading = (
        crowded(model, cache, tokens=96 * 12),
        crowded(model, cache, offload_bytes=0),
        crowded(model, cache),
    )
    expected = ids_of(run(roomy, requests))
    assert ids_of(run(recomputing, requests)) == ids_of(run(reloading, requests)) == expected
    assert roomy.load().preemptions == recomputing.load().reloaded_tokens == 0
    assert reloading.load().reloaded_tokens > 0
    assert reloading.load().computed_tokens < recomputing.load().computed_tokens
    assert reloading.load().computed_tokens == roomy.load().computed_tokens
    assert reloading.load().offloaded_bytes == 0
    assert_empty(reloading)


@pytest.mark.parametrize("offload_bytes", [1, 9000])
def test_what_finds_no_room_outside_is_computed_again(offload_bytes):
    model = small_model("hybrid")
    requests = some_requests(model, count=12, seed=1)
    engine = crowded(model, offload_bytes=offload_bytes)
    outcomes, queue, most = {}, list(requests), 0
    for request in queue:
        engine.submit(request)
        outcomes[request.id] = []
    while not engine.idle:
        for event in engine.step():
            outcomes[event.request] += [token.id for token in event.tokens]
        most = max(most, engine.load().offloaded_bytes)
    assert most <= offload_bytes
    assert engine.load().preemptions > 0
    assert outcomes == ids_of(run(make_engine(model), requests))
    assert_empty(engine)


def test_a_request_that_is_cancelled_while_its_states_are_outside_leaves_nothing():
    model = small_model("paged")
    engine = crowded(model)
    for request in some_requests(model, count=12, seed=1):
        engine.submit(request)
    while not engine.load().offloaded_bytes:
        engine.step()
    for i in range(12):
        engine.cancel(f"r{i}")
    assert engine.load().offloaded_bytes == 0
    engine.step()
    assert_empty(engine)


def test_completions_beams_and_scores_keep_their_values_too():
    model = small_model("window")
    text = tuple(range(1, 25))
    tasks = [
        Sampling(max_new_tokens=20, ignore_end=True, beams=Beams(width=3)),
        Sampling(max_new_tokens=20, ignore_end=True, temperature=1.0, seed=4, completions=3),
        Scoring(),
        Sampling(max_new_tokens=30, ignore_end=True, guesses=3),
        Sampling(max_new_tokens=30, ignore_end=True),
    ]
    requests = [Request(id=f"r{i}", token_ids=text, task=task) for i, task in enumerate(tasks * 2)]
    reloading = crowded(model, tokens=160, requests=6)
    expected = run_all(crowded(model, tokens=96 * 16, requests=32), requests)
    found = run_all(reloading, requests)
    assert ids_of(found) == ids_of(expected)
    assert reloading.load().reloaded_tokens > 0
    assert reloading.load().offloaded_bytes == 0
    assert_empty(reloading)


def test_coded_blocks_are_reloaded_too():
    """Codes and the rows after them leave together, and come back with the same bits."""
    model = small_model("window")
    requests = some_requests(model, count=12, seed=1)
    family = KiviCache(KiviLayout(block=8, group=4))
    engine = crowded(model, family)
    assert ids_of(run(engine, requests)) == ids_of(run(crowded(model, family, tokens=96 * 12), requests))
    assert engine.load().preemptions > 0
    assert engine.load().reloaded_tokens > 0
    assert_empty(engine)


class Unmovable(SharedCache):
    """A stranger's store, whose rows nobody else could read."""

    def create(self, specs, size):
        class Kept(SharedStore):
            def export(self, request, tokens):
                raise Incompatible(f"request {request} stays")

        return Kept(specs, size)


def test_a_store_that_cannot_export_computes_again():
    model = small_model("paged")
    requests = some_requests(model, count=12, seed=1)
    engine = crowded(model, Unmovable())
    assert ids_of(run(engine, requests)) == ids_of(run(crowded(model, tokens=96 * 12), requests))
    assert engine.load().preemptions > 0
    assert engine.load().reloaded_tokens == 0
    assert_empty(engine)


def test_less_than_no_memory_is_refused():
    with pytest.raises(InvalidValue, match="offload_bytes"):
        EngineLimits(offload_bytes=-1)
