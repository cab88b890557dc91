"""A draft model changes the number of steps and nothing else, whatever it drafts and whatever kind of state it has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_engine import Engine, EngineConfig, Request, SamplingParams, ScoringParams, build_engine
from draft_models import DRAFTS, draft_of, similar
from serving import assert_empty, make_engine, run_all, some_requests
from small_models import LETTERS, VOCABULARY, Linear, Softmax, small_model
from test_speculative_decoding import CHI_SQUARE_999_OF_26, exact, ids_of, plainly


def with_drafts(model, count=5, seed=0):
    requests = []
    for number, request in enumerate(some_requests(model, count, seed)):
        drawn = {"temperature": 0.6, "seed": number} if number % 2 else {}
        requests.append(
            replace(
                request, params=SamplingParams(max_new_tokens=18, ignore_eos=True, num_speculative_tokens=4, **drawn)
            )
        )
    return requests


@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft_changes_no_token(kind, cache):
    model = small_model("window" if kind == "slot" else "slot")
    requests = with_drafts(model)
    draft = draft_of(similar(model, DRAFTS[kind]), cache)
    engine = make_engine(model, cache, draft_model=draft, max_num_batched_tokens=60)
    assert ids_of(run_all(engine, requests, every=2)) == plainly(model, requests)
    assert engine.stats().draft_tokens >= engine.stats().accepted_tokens > 0
    assert_empty(engine)
    assert draft._store.usage().requests == 0


@pytest.mark.parametrize("kind", ["paged", "slot", "window"])
def test_a_draft_that_is_the_model_is_always_right_also_when_tokens_are_sampled(kind):
    model = small_model(kind)
    engine = make_engine(model, "shared", draft_model=draft_of(model), max_num_batched_tokens=128)
    requests = with_drafts(model, 4, seed=1)
    steps = 0
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        engine.step()
        steps += 1
    assert engine.stats().accepted_tokens == engine.stats().draft_tokens > 40
    assert steps < 10


def test_preemption_and_a_full_draft_change_nothing():
    model = small_model("paged")
    requests = with_drafts(model, 8, seed=3)
    draft = draft_of(similar(model, DRAFTS["slot"]), "paged", tokens=96, requests=3)
    engine = make_engine(model, "paged", tokens=112, max_num_batched_tokens=30, draft_model=draft)
    assert ids_of(run_all(engine, requests)) == plainly(model, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().draft_tokens > 0
    assert_empty(engine)
    assert draft._store.usage().requests == 0


def test_completions_beams_scores_and_a_short_draft_go_together():
    model = small_model("paged")
    several = SamplingParams(max_new_tokens=30, n=3, temperature=0.7, seed=4, ignore_eos=True, num_speculative_tokens=3)
    first, second, third = some_requests(model, 3)
    requests = [
        replace(first, params=several),
        replace(second, params=SamplingParams(max_new_tokens=6, num_beams=3, ignore_eos=True)),
        replace(third, params=ScoringParams()),
    ]
    alone = {}
    for request in requests:
        alone |= ids_of(run_all(make_engine(model), [request]))
    short = similar(model, DRAFTS["paged"])
    short.context = len(first.token_ids) + 9
    engine = make_engine(model, "shared", draft_model=draft_of(short))
    assert ids_of(run_all(engine, requests)) == alone
    assert engine.stats().draft_tokens > 0


@pytest.mark.parametrize("broken", ["raises", "gives NaN"])
def test_a_draft_that_fails_is_left_out(broken):
    model = small_model("paged")
    requests = with_drafts(model, 4)
    other = similar(model, DRAFTS["paged"])
    if broken == "raises":
        other.step = lambda *given: 1 / 0
    else:
        other.layers[0].project.weight.data.fill_(torch.nan)
    engine = make_engine(model, draft_model=draft_of(other))
    assert ids_of(run_all(engine, requests)) == plainly(model, requests)
    assert engine.stats().draft_tokens == 0
    assert_empty(engine)


def test_samples_with_a_draft_pass_a_chi_square_test():
    model = small_model("paged")
    prompt, words = (1, 2, 3, 2), (1, 2, 3)
    only = {token: -100.0 for token in range(VOCABULARY) if token not in words} | dict.fromkeys(words, 50.0)
    task = SamplingParams(max_new_tokens=3, temperature=1.0, logit_bias=only, num_speculative_tokens=2, ignore_eos=True)
    requests = [Request(id=str(i), token_ids=prompt, params=task.replace(seed=i)) for i in range(800)]
    draft = draft_of(similar(model, lambda: (Linear(), Softmax())), requests=64, tokens=96 * 64)
    engine = make_engine(
        model,
        "shared",
        requests=64,
        tokens=96 * 64,
        max_num_batched_tokens=1024,
        max_queued_requests=2000,
        draft_model=draft,
    )
    found = [tuple(outcome.ids) for outcome in run_all(engine, requests).values()]
    load = engine.stats()
    assert load.draft_tokens > load.accepted_tokens > 50
    likely = {key: share * len(found) for key, share in exact(model, prompt, words, 3).items()}
    assert sum((found.count(key) - n) ** 2 / n for key, n in likely.items()) < CHI_SQUARE_999_OF_26


def test_a_draft_of_another_vocabulary_or_with_a_source_is_refused():
    model, other = small_model("paged"), small_model("paged")
    other.vocab_size = VOCABULARY - 1
    with pytest.raises(InvalidValue, match=r"^draft_model: 'a vocabulary of 63 tokens'.*same vocabulary .* 64 tokens"):
        build_engine(model, LETTERS, draft_model=other)
    with pytest.raises(InvalidValue, match=r"^draft_model: .*allowed: a decoder$"):
        build_engine(model, LETTERS, draft_model=small_model("source"))
    engine = build_engine(model, LETTERS, EngineConfig(num_speculative_tokens=3), draft_model=small_model("slot"))
    assert isinstance(engine, Engine)
    (request,) = some_requests(model, 1)
    task = request.params.replace(max_new_tokens=12)
    assert ids_of(run_all(engine, [replace(request, params=task)])) == plainly(model, [replace(request, params=task)])
    assert engine.stats().draft_tokens > 0
