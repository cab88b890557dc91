"""The same request gives the same tokens, whatever else the engine does."""

from __future__ import annotations

import time
from functools import cache

import pytest
import torch
from attn_engine import Request, SamplingParams
from serving import assert_empty, make_engine, run, some_requests
from small_models import KINDS, small_model

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@cache
def model_and_requests(kind, count=8, seed=0):
    model = small_model(kind)
    return model, some_requests(model, count, seed)


@cache
def alone(kind, count=8, seed=0):
    model, requests = model_and_requests(kind, count, seed)
    return {request.id: run(make_engine(model), [request])[request.id].ids for request in requests}


def ids_of(outcomes):
    return {name: outcome.ids for name, outcome in outcomes.items()}


@EVERY_KIND
def test_a_request_alone_gives_the_tokens_of_plain_repeated_computation(kind):
    model = small_model(kind)
    for request in some_requests(model, 2):
        tokens = list(request.token_ids)
        for _ in range(request.params.max_new_tokens):
            # The whole sequence from the start, as one prompt, for every single token.
            fresh = run(
                make_engine(model),
                [
                    type(request)(
                        id="x",
                        token_ids=tuple(tokens),
                        encoder_token_ids=request.encoder_token_ids,
                        params=type(request.params)(max_new_tokens=1, ignore_eos=True),
                    )
                ],
            )
            tokens += fresh["x"].ids
        assert run(make_engine(model), [request])[request.id].ids == tokens[len(request.token_ids) :]


@EVERY_KIND
@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({}, id="in a crowd"),
        pytest.param({"max_num_batched_tokens": 3}, id="prompts in chunks of at most 3"),
        pytest.param({"max_num_batched_tokens": 11, "requests": 3}, id="waiting for places"),
    ],
)
def test_a_crowd_changes_nothing(kind, cache, setting):
    model, requests = model_and_requests(kind)
    engine = make_engine(model, cache, **setting)
    assert ids_of(run(engine, requests)) == alone(kind)
    assert_empty(engine)


@EVERY_KIND
@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])
def test_joining_and_leaving_a_running_batch_changes_nothing(kind, cache):
    model, requests = model_and_requests(kind)
    engine = make_engine(model, cache, max_num_batched_tokens=20)
    assert ids_of(run(engine, requests, every=3)) == alone(kind)
    assert_empty(engine)


@pytest.mark.parametrize("kind", ["paged", "window", "source", "replay", "hybrid"])
def test_preemption_changes_nothing(kind):
    model, requests = model_and_requests(kind, 12, 1)
    engine = make_engine(model, "paged", tokens=96, max_num_batched_tokens=40)
    outcomes = run(engine, requests)
    assert engine.stats().preemptions > 0
    assert ids_of(outcomes) == alone(kind, 12, 1)
    assert_empty(engine)


def test_two_half_grown_requests_do_not_block_each_other():
    model = small_model("paged")
    requests = some_requests(model, count=2, seed=5)
    grown = [
        type(r)(id=r.id, token_ids=tuple(range(30)), params=type(r.params)(max_new_tokens=60, ignore_eos=True))
        for r in requests
    ]
    engine = make_engine(model, "paged", tokens=96)
    outcomes = run(engine, grown)
    assert engine.stats().preemptions > 0
    assert all(len(outcome.ids) == 60 for outcome in outcomes.values())


def test_the_urgent_request_goes_first_and_is_never_thrown_out():
    model = small_model("paged")
    calm, urgent = (
        type(r)(
            id=r.id, token_ids=tuple(range(30)), priority=p, params=type(r.params)(max_new_tokens=60, ignore_eos=True)
        )
        for r, p in zip(some_requests(model, count=2), (0, 1), strict=True)
    )
    engine = make_engine(model, "paged", tokens=96)
    engine.submit(calm)
    engine.step()
    engine.submit(urgent)
    order = []
    while not engine.idle:
        order += [event.request_id for event in engine.step() if event.ended]
    assert order == [urgent.id, calm.id]


def test_decoding_goes_on_while_a_long_prompt_is_read():
    model = small_model("paged")
    short, long = some_requests(model, count=2)
    short = type(short)(id="short", token_ids=(1, 2), params=type(short.params)(max_new_tokens=20, ignore_eos=True))
    long = type(short)(
        id="long", token_ids=tuple(range(60)), params=type(short.params)(max_new_tokens=2, ignore_eos=True)
    )
    engine = make_engine(model, max_num_batched_tokens=8)
    engine.submit(short)
    engine.step()
    engine.submit(long)
    for _ in range(8):
        assert [event.request_id for event in engine.step()] == ["short"]
    assert {event.request_id for event in engine.step()} == {"short", "long"}


def test_no_gradient_is_recorded():
    model = small_model("slot")
    seen = []
    model.logits_before, model.logits = model.logits, lambda hidden: seen.append(hidden) or model.logits_before(hidden)
    run(make_engine(model), some_requests(model, 2))
    assert all(hidden.is_inference() for hidden in seen)
    assert torch.is_grad_enabled()


def test_logits_are_computed_only_for_rows_that_sample():
    model = small_model("paged")
    rows = []
    model.logits_before, model.logits = model.logits, lambda h: rows.append(len(h)) or model.logits_before(h)
    request = some_requests(model, 1)[0]
    request = type(request)(
        id="x", token_ids=tuple(range(50)), params=type(request.params)(max_new_tokens=3, ignore_eos=True)
    )
    run(make_engine(model, max_num_batched_tokens=20), [request])
    assert rows == [1, 1, 1]


def test_a_request_says_how_long_it_waited_to_be_scheduled():
    engine = make_engine(small_model("paged"), requests=1)
    for name in ("first", "second"):
        engine.submit(Request(id=name, token_ids=(5, 9, 2), params=SamplingParams(max_new_tokens=20, ignore_eos=True)))
    submitted = time.monotonic()
    usages, ended = {}, {}
    while not engine.idle:
        for output in engine.step():
            if output.last:
                usages[output.request_id], ended[output.request_id] = output.delta.usage, time.monotonic()
    # There is room for one: the second waits until the first has ended, and no longer than until it ends itself.
    assert 0 < usages["first"].queue_time < usages["second"].queue_time
    assert ended["first"] - submitted <= usages["second"].queue_time <= ended["second"] - submitted + 1
