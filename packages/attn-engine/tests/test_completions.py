"""Several completions of one prompt: each is what a request alone would give."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attn_core.errors import InvalidValue, Unavailable
from attn_engine import Request, SamplingParams, StructuredOutput
from serving import assert_empty, make_engine, run, run_all, some_requests
from small_models import JSON, KINDS, small_model

CACHES = pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])


def several(model, count: int, n: int, seed: int = 3, most: int = 9, **sampling) -> list[Request]:
    requests = some_requests(model, count, seed, temperature=1.3, n=n, **sampling)
    return [
        replace(r, params=r.params.replace(seed=1000 * i, max_new_tokens=min(r.params.max_new_tokens, most)))
        for i, r in enumerate(requests)
    ]


def alone(model, requests, **engine) -> dict[tuple[str, int], list[int]]:
    """The tokens of each completion, asked for by a request of its own."""
    found = {}
    for request in requests:
        for choice in range(request.n):
            task = request.params.replace(n=1, seed=request.params.seed + choice)
            found[request.id, choice] = run(make_engine(model, **engine), [replace(request, params=task)])[
                request.id
            ].ids
    return found


def ids_of(outcomes):
    return {key: outcome.ids for key, outcome in outcomes.items()}


@pytest.mark.parametrize(
    ("kind", "cache"), [*((kind, "shared") for kind in KINDS), ("hybrid", "contiguous"), ("hybrid", "paged")]
)
def test_each_completion_is_that_of_a_request_alone(kind, cache):
    model = small_model(kind)
    requests = several(model, 2, n=3)
    engine = make_engine(model, cache, max_num_batched_tokens=19)
    assert ids_of(run_all(engine, requests)) == alone(model, requests)
    assert_empty(engine)


def test_a_prompt_of_as_many_tokens_as_completions_is_read_at_its_last_token():
    model = small_model("paged")
    task = SamplingParams(max_new_tokens=3, temperature=1.3, seed=1, n=4, ignore_eos=True)
    requests = [Request(id="x", token_ids=(5, 9, 2, 7), params=task)]
    assert ids_of(run_all(make_engine(model), requests)) == alone(model, requests)


def test_the_prompt_is_computed_once():
    model = small_model("hybrid")
    request = Request(
        id="x",
        token_ids=tuple(range(40)),
        encoder_token_ids=(1, 2, 3),
        params=SamplingParams(max_new_tokens=2, temperature=1.0, seed=1, n=5, ignore_eos=True),
    )
    engine = make_engine(model, "paged")
    run_all(engine, [request])
    assert engine.stats().computed_tokens == 40 + 5
    assert engine.stats().cached_tokens == 4 * 40


@CACHES
@pytest.mark.parametrize("setting", [{"requests": 2}, {"max_num_batched_tokens": 3}], ids=str)
def test_completions_for_which_there_is_no_place_yet_come_later(cache, setting):
    model = small_model("hybrid")
    requests = several(model, 2, n=4, seed=8)
    engine = make_engine(model, cache, **setting)
    assert ids_of(run_all(engine, requests, every=2)) == alone(model, requests)
    assert_empty(engine)


def test_preemption_of_completions_changes_nothing():
    model = small_model("window")
    requests = several(model, 5, n=3, seed=1, most=25)
    engine = make_engine(model, "paged", tokens=128, max_num_batched_tokens=40)
    assert ids_of(run_all(engine, requests)) == alone(model, requests)
    assert engine.stats().preemptions > 0
    assert_empty(engine)


def test_penalties_and_grammars_follow_each_completion():
    model = small_model("paged")
    penal = several(model, 1, n=3, frequency_penalty=1.5, repetition_penalty=1.2)
    assert ids_of(run_all(make_engine(model), penal)) == alone(model, penal)
    task = SamplingParams(
        max_new_tokens=20, temperature=2.0, seed=5, n=3, structured_output=StructuredOutput(regex="[a-z]{5,9}")
    )
    guided = [Request(id="g", token_ids=(3, 4), params=task)]
    engine = make_engine(model, tokenizer=JSON)
    outcomes = run_all(engine, guided)
    assert ids_of(outcomes) == alone(model, guided, tokenizer=JSON)
    assert len({outcome.text for outcome in outcomes.values()}) == 3
    assert all(5 <= len(outcome.text) <= 9 for outcome in outcomes.values())


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelling_frees_every_completion_at_once(steps):
    model = small_model("hybrid")
    (request,) = several(model, 1, n=4)
    engine = make_engine(model, "shared", max_num_batched_tokens=9)
    engine.submit(replace(request, params=request.params.replace(max_new_tokens=30)))
    for _ in range(steps):
        engine.step()
    assert engine.cancel(request.id)
    events = [event for event in engine.step() if event.ended]
    assert [type(event.error) for event in events] == [Unavailable] * 4
    assert [event.last for event in events] == [False, False, False, True]
    assert_empty(engine)
    assert engine.idle


@pytest.mark.parametrize("value", [0, 65, 2.0, True])
def test_a_number_of_completions_out_of_range_is_refused(value):
    with pytest.raises(InvalidValue, match=r"^n: "):
        SamplingParams(n=value)


def test_the_largest_seed_is_followed_by_the_smallest():
    model = small_model("paged")
    task = SamplingParams(max_new_tokens=12, temperature=2.0, ignore_eos=True, seed=2**64 - 1, n=2)
    pair = run_all(make_engine(model), [Request(id="x", token_ids=(1,), params=task)])
    zero = run(make_engine(model), [Request(id="x", token_ids=(1,), params=task.replace(seed=0, n=1))])
    assert pair["x", 1].ids == zero["x"].ids != pair["x", 0].ids
