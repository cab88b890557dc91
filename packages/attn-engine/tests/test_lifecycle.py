from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest
import torch
from attn_core.errors import DeadlineExceeded, InvalidValue, Unavailable
from attn_engine import FinishReason, Request, SamplingParams
from serving import Outcome, assert_empty, make_engine, run, some_requests
from small_models import LETTERS, VOCABULARY, small_model


def prompt(length: int) -> tuple[int, ...]:
    return tuple(i % VOCABULARY for i in range(length))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("steps", [0, 1, 3], ids=["while waiting", "while its prompt is read", "while it decodes"])
def test_cancelling_frees_everything_before_the_next_step(steps):
    engine = make_engine(small_model("hybrid"), "paged", max_num_batched_tokens=20)
    engine.submit(
        Request(
            id="x",
            token_ids=prompt(30),
            encoder_token_ids=(1, 2),
            params=SamplingParams(max_new_tokens=40, ignore_eos=True),
        )
    )
    for _ in range(steps):
        engine.step()
    assert engine.cancel("x")
    assert_empty(engine)
    (event,) = engine.step()
    assert isinstance(event.error, Unavailable)
    assert event.delta.usage.completion_tokens == max(0, steps - 1)
    assert not engine.cancel("x")
    assert engine.idle


def test_cancelling_one_leaves_the_others_as_they_were():
    model = small_model("hybrid")
    requests = some_requests(model, 4, seed=9)
    undisturbed = run(make_engine(model), requests)
    engine = make_engine(model)
    outcomes = {request.id: Outcome() for request in requests}
    for request in requests:
        engine.submit(request)
    for step in range(100):
        if step == 2:
            engine.cancel("r1")
        for event in engine.step():
            outcomes[event.request_id].take(event)
    assert outcomes["r1"].ids == undisturbed["r1"].ids[: len(outcomes["r1"].ids)]
    for name in ("r0", "r2", "r3"):
        assert outcomes[name].ids == undisturbed[name].ids


def test_a_deadline_that_has_passed_in_the_queue_computes_nothing():
    clock = Clock()
    engine = make_engine(small_model("paged"), clock=clock)
    engine.submit(Request(id="x", token_ids=prompt(5), deadline=clock.now - 1, params=SamplingParams(max_new_tokens=9)))
    (event,) = engine.step()
    assert isinstance(event.error, DeadlineExceeded)
    assert engine.stats().computed_tokens == 0
    assert_empty(engine)


def test_a_deadline_ends_a_running_request_with_what_it_has():
    clock = Clock()
    engine = make_engine(small_model("paged"), clock=clock)
    engine.submit(
        Request(
            id="x",
            token_ids=prompt(5),
            deadline=clock.now + 1,
            params=SamplingParams(max_new_tokens=40, ignore_eos=True),
        )
    )
    outcome = Outcome()
    for _ in range(3):
        for event in engine.step():
            outcome.take(event)
    clock.now += 1
    for event in engine.step():
        outcome.take(event)
    assert isinstance(outcome.error, DeadlineExceeded)
    assert len(outcome.ids) == outcome.usage.completion_tokens == 3
    assert outcome.text == LETTERS.decode(outcome.ids)
    assert_empty(engine)


@pytest.mark.parametrize("jump", [-1e9, 1e9], ids=["back", "ahead"])
def test_a_clock_that_jumps_ends_those_with_a_deadline_at_most(jump):
    """Who named no deadline never asks what time it is; back in time nobody's is over."""
    clock = Clock()
    model = small_model("hybrid")
    requests = some_requests(model, 6, seed=4)
    undisturbed = run(make_engine(model), requests)
    timed = [
        replace(request, deadline=clock.now + 10) if place % 2 else request for place, request in enumerate(requests)
    ]
    engine = make_engine(model, "paged", clock=clock)
    outcomes = {request.id: Outcome() for request in requests}
    for request in timed:
        engine.submit(request)
    for step in range(60):
        clock.now += jump if step == 1 else 0.1
        for event in engine.step():
            outcomes[event.request_id].take(event)
    for place, request in enumerate(requests):
        late = jump > 0 and place % 2 and len(undisturbed[request.id].ids) > 1
        assert (isinstance(outcomes[request.id].error, DeadlineExceeded)) == bool(late)
        if not late:
            assert outcomes[request.id].ids == undisturbed[request.id].ids
    assert_empty(engine)


@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared", "int8", "kivi"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_pool_smaller_than_a_block_serves_what_fits_and_refuses_the_rest(cache, tokens):
    """Stores round up to whole blocks; whatever that leaves, nobody waits for room that never comes."""
    engine = make_engine(small_model("window"), cache, tokens=tokens, requests=1)
    ends, refused = [], 0
    for length in (1, 2, 4, 10, 40, 80):
        task = SamplingParams(max_new_tokens=3, ignore_eos=True)
        try:
            engine.submit(Request(id=str(length), token_ids=prompt(length), params=task))
        except InvalidValue:
            refused += 1
    for _ in range(40):
        ends += [event.delta.finish_reason for event in engine.step() if event.ended]
    assert refused + len(ends) == 6
    assert set(ends) <= {FinishReason.LENGTH}
    assert refused or cache == "kivi"
    assert_empty(engine)


def test_an_end_token_ends_the_text_unless_it_is_ignored():
    model = small_model("paged")
    (end,) = LETTERS.end_ids
    with torch.no_grad():
        model.head.bias[end] += 100
    ended, ignoring = (SamplingParams(max_new_tokens=5, ignore_eos=ignore) for ignore in (False, True))
    outcomes = run(
        make_engine(model),
        [Request(id=n, token_ids=(1,), params=t) for n, t in (("ended", ended), ("ignoring", ignoring))],
    )
    assert outcomes["ended"].finish_reason is FinishReason.END_OF_SEQUENCE
    assert (outcomes["ended"].ids, outcomes["ended"].text) == ([end], "")
    assert outcomes["ignoring"].finish_reason is FinishReason.LENGTH
    assert outcomes["ignoring"].ids == [end] * 5


def test_usage_counts_tokens_of_the_prompt_and_the_completion():
    engine = make_engine(small_model("paged"))
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    usage = run(engine, [Request(id="x", token_ids=prompt(7), params=params)])["x"].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 4)
    assert engine.stats().computed_tokens == 10


@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])
def test_nothing_leaks_after_a_random_program_of_submits_and_cancels(cache):
    rng = random.Random(4)
    model = small_model("hybrid")
    engine = make_engine(model, cache, tokens=192, requests=4, max_num_batched_tokens=24)
    ended: list[str] = []
    requests = [
        r for r in some_requests(model, 60, seed=4) if engine._store.fits(len(r.token_ids) + r.params.max_new_tokens)
    ]
    for step, request in enumerate(requests):
        engine.submit(request)
        for _ in range(rng.randrange(4)):
            ended += [event.request_id for event in engine.step() if event.ended]
        if step % 3 == 0:
            engine.cancel(rng.choice(requests[: step + 1]).id)
    while not engine.idle:
        ended += [event.request_id for event in engine.step() if event.ended]
    assert sorted(ended) == sorted(request.id for request in requests)
    assert_empty(engine)


def test_a_request_whose_logits_are_not_numbers_fails_alone():
    model = small_model("paged")
    requests = some_requests(model, 3, seed=2)
    undisturbed = run(make_engine(model), requests)
    with torch.no_grad():
        model.embed.weight[VOCABULARY - 1] = torch.nan
    sick = Request(id="sick", token_ids=(VOCABULARY - 1,), params=SamplingParams(max_new_tokens=3))
    warm = Request(id="warm", token_ids=(VOCABULARY - 1,), params=SamplingParams(max_new_tokens=3, temperature=1.0))
    healthy = [r for r in requests if VOCABULARY - 1 not in (*r.token_ids, *undisturbed[r.id].ids)]
    assert healthy
    outcomes = run(make_engine(model), [*healthy, sick, warm])
    for name in ("sick", "warm"):
        assert outcomes[name].error is not None
        assert "not finite" in str(outcomes[name].error)
    assert all(outcomes[r.id].ids == undisturbed[r.id].ids for r in healthy)


def test_a_source_that_cannot_be_encoded_fails_alone():
    model = small_model("source")
    requests = some_requests(model, 3, seed=2)
    encode = model.encode

    def moody(source):
        if len(source) == 12:
            raise RuntimeError("no such source")
        return encode(source)

    model.encode = moody
    bad = Request(id="bad", token_ids=(1,), encoder_token_ids=(1,) * 12, params=SamplingParams(max_new_tokens=9))
    outcomes = run(make_engine(model), [bad, *requests])
    assert outcomes["bad"].error is not None
    assert all(outcomes[r.id].finish_reason is FinishReason.LENGTH for r in requests)


@pytest.mark.parametrize(("cache", "tokens"), [("contiguous", 96 * 8), ("shared", 96 * 3)])
def test_what_an_engine_holds_does_not_grow_with_the_requests_it_has_served(cache, tokens):
    model = small_model("hybrid")
    engine = make_engine(model, cache, tokens=tokens)
    held = []
    for number in range(5):
        asked = [replace(each, scope=f"s{number}") for each in some_requests(model, 10, seed=number)]
        run(engine, asked)
        gc.collect()
        held.append(len(gc.get_objects()))
    # The first rounds fill what is remembered of beginnings; others then take their place.
    assert held[-1] - held[2] < 2 * 10


def test_load_tells_what_runs_and_what_waits():
    model = small_model("paged")
    engine = make_engine(model, requests=2)
    for request in some_requests(model, 5):
        engine.submit(request)
    assert (engine.stats().running, engine.stats().waiting) == (0, 5)
    engine.step()
    load = engine.stats()
    assert load.running <= 2
    assert load.waiting == 3
    assert 0 < load.kv_tokens_used <= load.kv_tokens_total
    assert load.generated_tokens == 2
