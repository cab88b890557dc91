"""What is computed once for requests that begin alike, and that nobody can tell from their tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from attn_engine import Request, SamplingParams, ScoringParams
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import assert_empty, make_engine, run
from small_models import KINDS, VOCABULARY, small_model

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
BLOCK = 16
MODELS = {kind: small_model(kind) for kind in KINDS}
HAS_SOURCE = {kind: any("source" in specs for specs in model.state_specs().values()) for kind, model in MODELS.items()}


def letters(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def asked(kind: str, name: str, tokens: tuple[int, ...], new: int = 6, **more) -> Request:
    source = (3, 1, 4) if HAS_SOURCE[kind] else None
    task = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return Request(**({"id": name, "token_ids": tokens, "params": task, "encoder_token_ids": source} | more))


def alone(kind: str, request: Request) -> list[int]:
    return run(make_engine(MODELS[kind]), [request])[request.id].ids


@EVERY_KIND
def test_a_repeated_prompt_computes_only_what_follows_its_last_whole_block(kind):
    engine = make_engine(MODELS[kind], "shared")
    prompt = letters(40)
    first = run(engine, [asked(kind, "first", prompt)])["first"]
    again = run(engine, [asked(kind, "again", prompt)])["again"]
    assert again.ids == first.ids == alone(kind, asked(kind, "alone", prompt))
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens == 2 * BLOCK == engine.stats().cached_tokens
    assert engine.stats().computed_tokens == 45 + 40 - 2 * BLOCK + 5
    assert_empty(engine)


@EVERY_KIND
def test_requests_that_begin_alike_give_the_tokens_of_each_alone(kind):
    common = letters(35)
    requests = [asked(kind, f"r{i}", common[: 20 + i] + letters(1 + 3 * i, i), new=3 + i) for i in range(8)]
    engine = make_engine(MODELS[kind], "shared", requests=3, max_num_batched_tokens=20)
    outcomes = run(engine, requests, every=2)
    assert {name: outcome.ids for name, outcome in outcomes.items()} == {r.id: alone(kind, r) for r in requests}
    assert engine.stats().cached_tokens > 0
    assert_empty(engine)


@pytest.mark.parametrize("kind", ["paged", "window", "source", "replay"])
def test_the_next_turn_of_a_conversation_finds_the_answer_computed_too(kind):
    engine = make_engine(MODELS[kind], "shared")
    question = letters(24)
    answer = run(engine, [asked(kind, "first", question, new=20)])["first"].ids
    turn = question + tuple(answer) + letters(5, 1)
    outcome = run(engine, [asked(kind, "second", turn)])["second"]
    assert outcome.usage.cached_tokens == (24 + 20 - 1) // BLOCK * BLOCK
    assert outcome.ids == alone(kind, asked(kind, "alone", turn))


@pytest.mark.parametrize("scopes", [("ann", "ben"), ("ann", ""), (None, None), ("", None)])
def test_nothing_is_shared_between_scopes_or_by_a_request_without_one(scopes):
    engine = make_engine(MODELS["paged"], "shared")
    for number, scope in enumerate(scopes):
        outcome = run(engine, [asked("paged", f"r{number}", letters(40), scope=scope)])[f"r{number}"]
        assert outcome.usage.cached_tokens == 0


def test_nothing_is_shared_between_sources():
    engine = make_engine(MODELS["source"], "shared")
    for number, source in enumerate([(1, 2), (1, 3)]):
        request = asked("source", f"r{number}", letters(40), encoder_token_ids=source)
        outcome = run(engine, [request])[request.id]
        assert outcome.usage.cached_tokens == 0
        assert outcome.ids == alone("source", request)


def test_scores_are_told_for_every_token_though_the_prompt_is_remembered():
    engine = make_engine(MODELS["paged"], "shared")
    run(engine, [asked("paged", "warm", letters(40))])
    scored = run(engine, [asked("paged", "scored", letters(40), params=ScoringParams())])["scored"]
    assert len(scored.tokens) == 40
    assert scored.usage.cached_tokens == 0


@pytest.mark.parametrize("kind", ["paged", "window", "replay", "hybrid", "source"])
def test_remembered_beginnings_give_way_to_running_requests(kind):
    requests = [asked(kind, f"r{i}", letters(20, i % 3) + letters(i, 9), new=25) for i in range(12)]
    engine = make_engine(MODELS[kind], "shared", tokens=96, max_num_batched_tokens=40)
    outcomes = run(engine, requests)
    assert engine.stats().preemptions > 0
    assert {name: outcome.ids for name, outcome in outcomes.items()} == {r.id: alone(kind, r) for r in requests}
    assert_empty(engine)
    largest = asked(kind, "largest", letters(90, 5), new=4)
    assert run(engine, [largest])["largest"].ids == alone(kind, largest)


@EVERY_KIND
@settings(max_examples=15, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 50), st.integers(0, 12), st.integers(1, 8), st.booleans()),
        min_size=1,
        max_size=10,
    ),
    max_num_batched_tokens=st.integers(5, 60),
)
def test_whatever_the_schedule_tokens_are_those_of_each_alone_and_nothing_leaks(kind, plan, max_num_batched_tokens):
    engine = make_engine(MODELS[kind], "shared", tokens=160, requests=4, max_num_batched_tokens=max_num_batched_tokens)
    heard: dict[str, list[int]] = {}
    requests = {}
    cancelled = set()
    for number, (stem, length, extra, new, cancel) in enumerate(plan):
        request = asked(kind, f"r{number}", letters(length, stem) + letters(extra, 70 + number), new=new)
        requests[request.id] = request
        engine.submit(request)
        for _ in range(2):
            for event in engine.step():
                heard.setdefault(event.request_id, []).extend(token.id for token in event.delta.tokens)
        if cancel and engine.cancel(request.id):
            cancelled.add(request.id)
    while not engine.idle:
        for event in engine.step():
            heard.setdefault(event.request_id, []).extend(token.id for token in event.delta.tokens)
    for name, request in requests.items():
        expected = alone(kind, request)
        told = heard.get(name, [])
        assert told == (expected[: len(told)] if name in cancelled else expected)
    assert_empty(engine)


def test_a_snapshot_of_fixed_states_is_taken_of_as_many_beginnings_as_requests_can_run():
    engine = make_engine(MODELS["slot"], "shared", requests=2)
    for number in range(3):
        run(engine, [asked("slot", f"warm{number}", letters(20, number))])
    again = [run(engine, [asked("slot", f"r{n}", letters(20, n))])[f"r{n}"].usage for n in (2, 1, 0)]
    assert [usage.cached_tokens for usage in again] == [BLOCK, BLOCK, 0]


def test_a_request_of_a_store_that_cannot_share_is_served_all_the_same():
    request = asked("paged", "r", letters(40))
    engine = make_engine(MODELS["paged"], "paged")
    run(engine, [request])
    assert run(engine, [replace(request, id="s")])["s"].usage.cached_tokens == 0
