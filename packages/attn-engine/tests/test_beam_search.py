"""Beam search in the running batch finds what an independent beam search finds, and leaves nothing behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from attn_core.errors import InternalError, InvalidValue, Unavailable
from attn_engine import Request, SamplingParams
from serving import assert_empty, make_engine, run, run_all, some_requests
from small_models import KINDS, LETTERS, VOCABULARY, small_model

pytest.importorskip("transformers")
from transformers_beams import beam_search

SETTINGS = {
    "plain": {},
    "one": {"n": 1},
    "long": {"length_penalty": 2.0},
    "short": {"length_penalty": -1.0},
    "full": {"early_stopping": True},
    "never": {"early_stopping": "never", "length_penalty": 0.7},
    "penalised": {"repetition_penalty": 1.4, "min_new_tokens": 4},
    "endless": {"ignore_eos": True},
}


def likely_end(kind: str):
    """A model that ends often enough for hypotheses of all lengths to compete."""
    model = small_model(kind)
    model.head.bias.data[VOCABULARY - 1] += 0.5
    return model


def searching(model, name: str, count: int = 1, seed: int = 0) -> list[Request]:
    given = {"num_beams": 4, "n": 3, "ignore_eos": False, "max_new_tokens": 9} | SETTINGS[name]
    return [replace(r, params=SamplingParams(**given)) for r in some_requests(model, count, seed)]


def found(engine, requests, **how):
    outcomes = run_all(engine, requests, **how)
    assert_empty(engine)
    assert engine._store.usage().requests == 0
    return {key: (outcome.ids, pytest.approx(outcome.score, abs=1e-5)) for key, outcome in outcomes.items()}


def expected(model, requests):
    return {
        (request.id, choice): hypothesis
        for request in requests
        for choice, hypothesis in enumerate(beam_search(model, request, LETTERS.end_ids))
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_a_search_finds_what_transformers_finds(name):
    model = likely_end("paged")
    requests = searching(model, name, 3, seed=4)
    assert found(make_engine(model, "paged", requests=12), requests) == expected(model, requests)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_state_is_forked(kind):
    model = likely_end(kind)
    requests = searching(model, "plain", 1, seed=2)
    assert found(make_engine(model, "shared", requests=12), requests) == expected(model, requests)


def mixed(model) -> list[Request]:
    """Searches among plain requests and several completions, the most urgent in the middle."""
    rng = random.Random(5)
    requests: list[Request] = []
    for number, request in enumerate(some_requests(model, 9, 7)):
        named = replace(request, id=f"m{number}", priority=rng.randrange(2))
        if number % 3 == 0:
            requests.append(replace(named, params=searching(model, "plain")[0].params))
        elif number % 3 == 1:
            requests.append(replace(named, params=SamplingParams(max_new_tokens=8, temperature=1, seed=number, n=2)))
        else:
            requests.append(named)
    return requests


@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param({"requests": 12, "max_num_batched_tokens": 9}, id="in chunks"),
        pytest.param({"requests": 5}, id="waiting for places"),
        pytest.param({"requests": 12, "tokens": 320}, id="waiting for room"),
    ],
)
def test_a_crowd_changes_no_search_and_a_search_nobody_else(cache, setting):
    model = likely_end("hybrid")
    requests = mixed(model)
    if cache == "contiguous" and "tokens" in setting:
        setting = setting | {"tokens": 12 * 64}
    alone = {}
    for request in requests:
        outcomes = run_all(make_engine(model, requests=8), [request])
        alone |= {key: (outcome.ids, outcome.score) for key, outcome in outcomes.items()}
    engine = make_engine(model, cache, **setting)
    crowd = run_all(engine, requests, every=2)
    assert {key: outcome.ids for key, outcome in crowd.items()} == {key: ids for key, (ids, _) in alone.items()}
    assert all(o.score == pytest.approx(alone[k][1], abs=1e-9) for k, o in crowd.items() if alone[k][1])
    assert_empty(engine)


def test_searches_that_throw_each_other_out_find_the_same():
    model = likely_end("window")
    requests = [replace(r, token_ids=(*range(20),)) for r in searching(model, "endless", 4, seed=3)]
    requests[-1] = replace(requests[-1], priority=1)
    engine = make_engine(model, "paged", tokens=16 * 9, requests=16, max_num_batched_tokens=60)
    assert found(engine, requests, every=3) == expected(model, requests)
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("steps", range(0, 9, 2))
def test_cancelling_a_beam_search_frees_all_its_beams(steps):
    model = likely_end("hybrid")
    (request,) = searching(model, "endless")
    engine = make_engine(model, "shared", max_num_batched_tokens=11)
    engine.submit(request)
    for _ in range(steps):
        engine.step()
    assert engine.cancel(request.id)
    assert_empty(engine)
    assert [type(event.error) for event in engine.step()] == [Unavailable] * 3
    assert engine.idle


def test_the_text_is_that_of_the_tokens_without_the_end():
    model = likely_end("paged")
    (request,) = searching(model, "plain", seed=4)
    outcomes = run_all(make_engine(model), [request])
    outcome = outcomes[request.id, 0]
    ids = outcome.ids[:-1] if outcome.ids[-1] == VOCABULARY - 1 else outcome.ids
    assert outcome.text == LETTERS.decode(ids)
    (usage,) = [outcome.usage for outcome in outcomes.values() if outcome.usage]
    assert usage.completion_tokens == sum(len(outcome.ids) for outcome in outcomes.values())


def test_log_probabilities_come_along_and_add_up_to_the_score():
    model = likely_end("paged")
    (request,) = searching(model, "short", seed=4)
    task = request.params.replace(top_logprobs=2)
    for outcome in run_all(make_engine(model), [replace(request, params=task)]).values():
        total = sum(token.logprob for token in outcome.tokens)
        assert outcome.score == pytest.approx(total * len(outcome.tokens), abs=1e-4)
        assert all(len(token.top_logprobs) == 2 for token in outcome.tokens)


def test_a_search_without_numbers_fails_alone():
    model = likely_end("paged")
    (search,) = searching(model, "plain")
    plain = Request(id="plain", token_ids=(1, 2, 3), params=SamplingParams(max_new_tokens=12, ignore_eos=True))
    whole = run(make_engine(model), [plain])["plain"].ids
    broken = next(token for token in range(VOCABULARY) if token not in {1, 2, 3, *whole})
    model.embed.weight.data[broken] = float("nan")
    engine = make_engine(model, requests=12)
    outcomes = run_all(engine, [plain, replace(search, token_ids=(broken, 4))])
    assert outcomes["plain", 0].ids == whole
    for choice in range(3):
        assert isinstance(outcomes[search.id, choice].error, InternalError)
    assert_empty(engine)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("num_beams", {"num_beams": 0}),
        ("num_beams", {"num_beams": 65}),
        ("num_beams", {"num_beams": True}),
        ("length_penalty", {"num_beams": 2, "length_penalty": float("nan")}),
        ("length_penalty", {"num_beams": 2, "length_penalty": 1e9}),
        ("early_stopping", {"num_beams": 2, "early_stopping": "soon"}),
    ],
)
def test_impossible_beams_are_refused(field, options):
    with pytest.raises(InvalidValue, match=rf"^{field}: "):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.5), ("top_k", 3), ("top_p", 0.5), ("seed", 1), ("n", 3)],
)
def test_options_that_conflict_with_beams_are_refused(field, value):
    with pytest.raises(InvalidValue, match=rf"^{field}: "):
        SamplingParams(num_beams=2, **{field: value})


def test_more_beams_than_tokens_are_refused_for_the_vocabulary_not_the_cache():
    model = small_model("paged")
    model.vocab_size = 4
    engine = make_engine(model, "paged", tokens=4096, requests=128)
    task = SamplingParams(max_new_tokens=2, num_beams=16)
    with pytest.raises(InvalidValue, match=r"^num_beams: 16 is not allowed; allowed: at most 4, the size of the voc"):
        engine.submit(Request(id="x", token_ids=(1,), params=task))


def test_a_search_that_could_never_be_held_is_refused():
    model = small_model("paged")
    task = SamplingParams(max_new_tokens=20, num_beams=4)
    for cache, options in (("paged", {"tokens": 96, "requests": 8}), ("contiguous", {"requests": 3})):
        engine = make_engine(model, cache, **options)
        with pytest.raises(InvalidValue, match=r"^num_beams: '4 beams"):
            engine.submit(Request(id="x", token_ids=(1,) * 10, params=task))
        assert engine.idle
