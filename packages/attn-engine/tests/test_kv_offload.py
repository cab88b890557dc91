"""A preempted request is reloaded from offloaded memory: the same tokens, and less to compute."""

from __future__ import annotations

import pytest
from attn_cache import KiviCache, KiviLayout, SharedCache
from attn_cache.prefix_cache import SharedStore
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams, ScoringParams
from serving import assert_empty, make_engine, run, run_all, some_requests
from small_models import KINDS, LETTERS, small_model

ROOM = 1 << 24


def crowded(model, cache="paged", kv_offload_bytes=ROOM, tokens=96, requests=8) -> Engine:
    family = installed().caches.get(cache) if isinstance(cache, str) else cache
    store = family.create(model.state_specs(), StoreSize(tokens=tokens, requests=requests, dtype="float64"))
    return Engine(model, store, LETTERS, EngineConfig(max_num_batched_tokens=40, kv_offload_bytes=kv_offload_bytes))


def ids_of(outcomes) -> dict:
    return {name: outcome.ids for name, outcome in outcomes.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "slot"])
@pytest.mark.parametrize("cache", ["paged", "shared", "int8"])
def test_reloading_changes_no_token_and_computes_less_than_recomputing(kind, cache):
    model = small_model(kind)
    requests = some_requests(model, count=12, seed=1)
    roomy, recomputing, reloading = (
        crowded(model, cache, tokens=96 * 12),
        crowded(model, cache, kv_offload_bytes=0),
        crowded(model, cache),
    )
    expected = ids_of(run(roomy, requests))
    assert ids_of(run(recomputing, requests)) == ids_of(run(reloading, requests)) == expected
    assert roomy.stats().preemptions == recomputing.stats().reloaded_tokens == 0
    assert reloading.stats().reloaded_tokens > 0
    assert reloading.stats().computed_tokens < recomputing.stats().computed_tokens
    assert reloading.stats().computed_tokens == roomy.stats().computed_tokens
    assert reloading.stats().offloaded_bytes == 0
    assert_empty(reloading)


@pytest.mark.parametrize("kv_offload_bytes", [1, 9000])
def test_what_finds_no_room_outside_is_computed_again(kv_offload_bytes):
    model = small_model("hybrid")
    requests = some_requests(model, count=12, seed=1)
    engine = crowded(model, kv_offload_bytes=kv_offload_bytes)
    outcomes, queue, most = {}, list(requests), 0
    for request in queue:
        engine.submit(request)
        outcomes[request.id] = []
    while not engine.idle:
        for event in engine.step():
            outcomes[event.request_id] += [token.id for token in event.delta.tokens]
        most = max(most, engine.stats().offloaded_bytes)
    assert most <= kv_offload_bytes
    assert engine.stats().preemptions > 0
    assert outcomes == ids_of(run(make_engine(model), requests))
    assert_empty(engine)


def test_a_request_that_is_cancelled_while_its_states_are_outside_leaves_nothing():
    model = small_model("paged")
    engine = crowded(model)
    for request in some_requests(model, count=12, seed=1):
        engine.submit(request)
    while not engine.stats().offloaded_bytes:
        engine.step()
    for i in range(12):
        engine.cancel(f"r{i}")
    assert engine.stats().offloaded_bytes == 0
    engine.step()
    assert_empty(engine)


def test_completions_beams_and_scores_keep_their_values_too():
    model = small_model("window")
    text = tuple(range(1, 25))
    tasks = [
        SamplingParams(max_new_tokens=20, ignore_eos=True, num_beams=3),
        SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=1.0, seed=4, n=3),
        ScoringParams(),
        SamplingParams(max_new_tokens=30, ignore_eos=True, num_speculative_tokens=3),
        SamplingParams(max_new_tokens=30, ignore_eos=True),
    ]
    requests = [Request(id=f"r{i}", token_ids=text, params=task) for i, task in enumerate(tasks * 2)]
    reloading = crowded(model, tokens=160, requests=6)
    expected = run_all(crowded(model, tokens=96 * 16, requests=32), requests)
    found = run_all(reloading, requests)
    assert ids_of(found) == ids_of(expected)
    assert reloading.stats().reloaded_tokens > 0
    assert reloading.stats().offloaded_bytes == 0
    assert_empty(reloading)


def test_coded_blocks_are_reloaded_too():
    """Codes and the rows after them leave together, and come back with the same bits."""
    model = small_model("window")
    requests = some_requests(model, count=12, seed=1)
    family = KiviCache(KiviLayout(block=8, group=4))
    engine = crowded(model, family)
    assert ids_of(run(engine, requests)) == ids_of(run(crowded(model, family, tokens=96 * 12), requests))
    assert engine.stats().preemptions > 0
    assert engine.stats().reloaded_tokens > 0
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
    assert engine.stats().preemptions > 0
    assert engine.stats().reloaded_tokens == 0
    assert_empty(engine)


def test_less_than_no_memory_is_refused():
    with pytest.raises(InvalidValue, match="kv_offload_bytes"):
        EngineConfig(kv_offload_bytes=-1)
