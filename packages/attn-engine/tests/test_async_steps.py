"""Steps launched before the tokens of the last are known give the same tokens, texts and ends, and leave nothing.

The steps are those that a GPU repeats as graphs, computed on the CPU in float64.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_core.errors import DeadlineExceeded, Unavailable
from attn_engine import Request, SamplingParams, ScoringParams
from attn_engine.graphs import Rerun, StepGraphs, StepLimits
from attn_engine.sequence import Sequence
from attn_schema import StructuredOutput
from serving import assert_empty, make_engine, run_all, some_requests
from small_models import InPlace, Linear, SmallModel

KINDS = {
    "whole": lambda: (InPlace(), InPlace()),
    "window": lambda: (InPlace(window=7), InPlace()),
}
PLAIN = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 0.7, "seed": 1, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.1, "seed": 5, "min_p": 0.05},
    {"temperature": 1.1, "seed": 6, "typical_p": 0.8},
    {"logit_bias": {5: 2.0, 9: -3.0}},
    {"temperature": 0.8, "seed": 2, "n": 3},
    {"ignore_eos": False, "logit_bias": {63: 3.0}, "temperature": 1.0, "seed": 11},
    {"ignore_eos": False, "logit_bias": {63: 30.0}, "min_new_tokens": 6},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"temperature": 0.8, "seed": 8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "n": 2},
    {"top_logprobs": 2},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9},
]
WAITING = [
    {"num_beams": 3},
    {"num_speculative_tokens": 3},
]


def model_of(kind: str = "whole") -> SmallModel:
    torch.manual_seed(7)
    return SmallModel(*KINDS[kind]()).double().eval()


def engine_of(model, *, ahead: bool, **options):
    """An engine that repeats decode steps, launched ahead or one after the other."""
    engine = make_engine(model, async_scheduling=ahead, **({"cache": "paged", "requests": 16} | options))
    engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(0, 16))
    return engine


def requests_of(model, options, seed: int = 0, **more) -> list[Request]:
    """A request for each of these options, and one that stops at a text."""
    found = []
    for number, one in enumerate(options):
        (plain,) = some_requests(model, 1, seed=seed + number)
        params = plain.params.replace(**one)
        suppressed = {"suppress_tokens": frozenset({1, 2})} if number % 4 == 1 else {}
        found.append(replace(plain, id=str(number), params=params, **suppressed, **more))
    stopping = SamplingParams(max_new_tokens=40, temperature=1.5, seed=9, stop=("a", "eE", "9"))
    return [*found, Request(id="stopping", token_ids=(4, 5), params=stopping, **more)]


def told(outcomes):
    """What callers are told, but for log probabilities, which are rounded as steps are."""
    return {key: (one.ids, one.text, one.finish_reason, one.stop_reason, one.error) for key, one in outcomes.items()}


def counted(outcomes):
    """The tokens that each request is told to have generated, with the last of its completions."""
    usages = [(name, one.usage) for (name, _), one in outcomes.items() if one.usage is not None]
    return {name: usage.completion_tokens for name, usage in usages}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["paged", "shared"])
@pytest.mark.parametrize("every", [0, 1, 3], ids=["a crowd", "joining at once", "joining one by one"])
def test_tokens_texts_and_ends_are_those_of_steps_one_after_the_other(kind, cache, every):
    model = model_of(kind)
    requests = requests_of(model, PLAIN)
    one_by_one = run_all(engine_of(model, ahead=False, cache=cache), requests, every=every)
    engine = engine_of(model, ahead=True, cache=cache, max_num_batched_tokens=40)
    found, expected = run_all(engine, requests, every=every), told(one_by_one)
    assert (told(found), counted(found)) == (expected, counted(one_by_one))
    assert engine._async.launched_ahead > 10
    assert {reason for _, _, reason, *_ in expected.values()} == {"stop", "length", "end_of_sequence"}
    again = told(run_all(engine, [replace(one, id=f"{one.id} again") for one in requests]))  # prefixes may be cached
    assert list(again.values()) == list(expected.values())
    assert_empty(engine)


@pytest.mark.parametrize("every", [0, 2], ids=["a crowd", "joining one by one"])
def test_requests_that_must_wait_for_their_tokens_do_beside_those_that_need_not(every):
    pytest.importorskip("llguidance")
    model = model_of()
    spelled = Request(
        id="spelled",
        token_ids=(3, 9),
        params=SamplingParams(max_new_tokens=9, structured_output=StructuredOutput(regex="[a-e]{3,7}")),
    )
    scored = Request(id="scored", token_ids=tuple(range(20)), params=ScoringParams())
    requests = [*requests_of(model, [*PLAIN, *WAITING]), spelled, scored]
    expected = told(run_all(engine_of(model, ahead=False), requests, every=every))
    engine = engine_of(model, ahead=True, max_num_batched_tokens=40)
    assert told(run_all(engine, requests, every=every)) == expected
    assert_empty(engine)


@pytest.mark.parametrize("options", WAITING, ids=str)
def test_no_step_is_launched_ahead_whose_choice_needs_more_than_the_last_token(options):
    model = model_of()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True).replace(**options)
    engine = engine_of(model, ahead=True)
    run_all(engine, [Request(id="a", token_ids=(1, 2), params=params)])
    assert engine._async.launched_ahead == 0


@pytest.mark.parametrize("options", PLAIN, ids=str)
def test_all_steps_but_that_of_the_prompt_and_the_next_are_launched_ahead(options):
    model = model_of()
    params = SamplingParams(max_new_tokens=12).replace(**options | {"ignore_eos": True, "n": 1})
    engine = engine_of(model, ahead=True)
    outcomes = run_all(engine, [Request(id="a", token_ids=(1, 2), params=params)])
    assert all(len(outcome.ids) == 12 for outcome in outcomes.values())
    assert engine._async.launched_ahead == 10


def test_log_probabilities_are_those_of_steps_one_after_the_other():
    model = model_of()
    requests = requests_of(model, [{"top_logprobs": 3}, {"temperature": 0.8, "seed": 2, "top_logprobs": 0}, {}])
    expected = run_all(engine_of(model, ahead=False), requests)
    engine = engine_of(model, ahead=True)
    found = run_all(engine, requests)
    assert engine._async.launched_ahead > 3
    for key, outcome in found.items():
        for one, other in zip(outcome.tokens, expected[key].tokens, strict=True):
            assert (one.id, one.logprob is None) == (other.id, other.logprob is None)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [top.id for top in one.top_logprobs or ()] == [top.id for top in other.top_logprobs or ()]


@pytest.mark.parametrize("cache", ["paged", "shared"])
@pytest.mark.parametrize("every", [0, 2], ids=["a crowd", "joining one by one"])
def test_sequences_that_need_more_candidates_go_on_from_the_token_they_turn_out_to_have(monkeypatch, cache, every):
    """Their next step has run with another token meanwhile."""
    monkeypatch.setattr("attn_engine.batch_sampler.CANDIDATES", 3)
    model = model_of("window")
    nucleus = [
        {"temperature": 1.5, "seed": 4, "top_p": 0.9},
        {"temperature": 1.2, "seed": 6, "top_p": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.3, "seed": 1, "top_k": 20, "top_logprobs": 2},
        {"temperature": 0.2, "seed": 2, "top_p": 0.5},
        {},
    ]
    requests = requests_of(model, nucleus)
    expected = run_all(engine_of(model, ahead=False, cache=cache), requests, every=every)
    engine = engine_of(model, ahead=True, cache=cache, max_num_batched_tokens=40)
    taken = []
    kept = Sequence.undo_last_token
    monkeypatch.setattr(Sequence, "undo_last_token", lambda one: taken.append(one.id) or kept(one))
    found = run_all(engine, requests, every=every)
    assert told(found) == told(expected)
    assert len(taken) > 3
    assert engine._async.launched_ahead > 3
    assert_empty(engine)


@pytest.mark.parametrize("cache", ["paged", "shared"])
def test_nobody_is_preempted_for_a_token_ahead_and_preemption_changes_no_token(cache):
    model = model_of()
    requests = requests_of(model, PLAIN[:6] * 2, seed=3)
    expected = told(run_all(engine_of(model, ahead=False, cache=cache), requests))
    few = {"cache": cache, "tokens": 96, "max_num_batched_tokens": 40}
    lockstep, engine = (engine_of(model, ahead=ahead, **few) for ahead in (False, True))
    run_all(lockstep, requests)
    assert told(run_all(engine, requests)) == expected
    assert engine.stats().preemptions > 0
    assert engine._async.launched_ahead > 0
    assert engine.stats().preemptions <= lockstep.stats().preemptions
    assert_empty(engine)


@pytest.mark.parametrize("after", range(6))
def test_requests_cancelled_between_any_two_steps_leave_the_others_their_tokens(after):
    model = model_of()
    requests = requests_of(model, PLAIN)
    expected = told(run_all(engine_of(model, ahead=False), requests))
    engine = engine_of(model, ahead=True)
    for request in requests:
        engine.submit(request)
    found = {key: [] for key in expected}
    errors = {}
    for number in range(300):
        if number in (after, after + 3):
            engine.cancel(str(number % 8))
        for output in engine.step():
            found[output.request_id, output.delta.index] += [token.id for token in output.delta.tokens]
            if output.error is not None:
                errors[output.request_id] = output.error
        if engine.idle:
            break
    assert engine.idle
    assert all(isinstance(error, Unavailable) for error in errors.values())
    for (name, index), ids in found.items():
        whole = expected[name, index][0]
        assert ids == (whole[: len(ids)] if name in errors else whole)
    assert_empty(engine)


def test_a_request_that_comes_under_the_name_of_one_cancelled_gets_its_own_tokens():
    model = model_of()
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    first, second = (Request(id="a", token_ids=ids, params=params) for ids in ((1, 2), (3, 4)))
    expected = told(run_all(engine_of(model, ahead=False), [second]))
    engine = engine_of(model, ahead=True)
    engine.submit(first)
    for _ in range(3):
        engine.step()
    engine.cancel("a")
    assert [output.last for output in engine.step()] == [True]
    assert told(run_all(engine, [second])) == expected


def test_deadlines_and_failures_of_all_requests_end_steps_in_flight():
    model, now = model_of(), [0.0]
    engine = engine_of(model, ahead=True, clock=lambda: now[0])
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    engine.submit(Request(id="late", token_ids=(1, 2), params=params, deadline=10.0))
    for _ in range(4):
        engine.step()
    now[0] = 11.0
    (late,) = engine.step()
    assert isinstance(late.error, DeadlineExceeded)
    engine.submit(Request(id="failed", token_ids=(1, 2), params=params))
    for _ in range(4):
        engine.step()
    engine.fail_all(Unavailable("gone"))
    assert [output.last for output in engine.step()] == [True]
    assert engine.idle
    assert_empty(engine)
    request = Request(id="next", token_ids=(5, 6), params=params)
    assert told(run_all(engine, [request])) == told(run_all(engine_of(model, ahead=False), [request]))


def test_a_new_request_joins_after_at_most_one_step_that_was_launched():
    model = model_of()
    engine = engine_of(model, ahead=True)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine.submit(Request(id="a", token_ids=(1, 2), params=params))
    for _ in range(5):
        engine.step()
    engine.submit(Request(id="b", token_ids=(3, 4), params=params))
    first = [{output.request_id for output in engine.step()} for _ in range(2)]
    assert first == [{"a"}, {"a", "b"}]


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_read(monkeypatch):
    seen = []
    engine = engine_of(model_of(), ahead=True)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    engine.submit(Request(id="a", token_ids=(1, 2), params=params))
    engine.step()
    launched, finished = engine._async._launched, engine._async.finish
    monkeypatch.setattr(engine._async, "_launched", lambda *given: seen.append("launch") or launched(*given))
    monkeypatch.setattr(engine._async, "finish", lambda *given: seen.append("read") or finished(*given))
    steps = 0
    while not engine.idle:
        assert sum(len(output.delta.tokens) for output in engine.step()) == 1
        steps += 1
    assert steps == 5
    # No step follows that of the last token, which is known to be the last.
    assert seen == ["launch", *["launch", "read"] * 4, "read"]


class Failing(InPlace):
    """Raises in steps over inputs in place, from one on, for a number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.fails = 0, ()

    def step(self, x, batch, state):
        if getattr(state["kv"], "in_place", lambda: None)() is not None:
            self.steps += 1
            if self.steps in self.fails:
                raise RuntimeError("no such luck")
        return super().step(x, batch, state)


def test_a_step_that_cannot_be_launched_is_computed_anew():
    torch.manual_seed(7)
    layer = Failing()
    model = SmallModel(layer, InPlace()).double().eval()
    requests = requests_of(model, PLAIN[:4])
    expected = told(run_all(engine_of(model, ahead=False), requests))
    engine = engine_of(model, ahead=True)
    engine.warm_up()
    layer.fails = (layer.steps + 4, layer.steps + 5, layer.steps + 9)
    assert told(run_all(engine, requests)) == expected
    assert engine._async.launched_ahead > 5
    assert_empty(engine)


def test_logits_that_are_no_numbers_end_their_request_alone():
    model = model_of()
    kept = model.logits
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    requests = [Request(id=name, token_ids=ids, params=params) for name, ids in (("a", (1, 2)), ("b", (3, 4)))]
    expected = told(run_all(engine_of(model, ahead=False), requests))
    calls = []

    def logits(hidden):
        calls.append(len(hidden))
        found = kept(hidden)
        if len(calls) == 6:
            found[1] = torch.nan
        return found

    model.logits = logits
    engine = engine_of(model, ahead=True)
    found = run_all(engine, requests)
    assert {key: outcome.error is None for key, outcome in found.items()} == {("a", 0): True, ("b", 0): False}
    assert told(found)["a", 0] == expected["a", 0]
    assert found["b", 0].ids == expected["b", 0][0][: len(found["b", 0].ids)]
    assert_empty(engine)


def test_an_engine_says_why_it_launches_no_step_ahead():
    torch.manual_seed(7)
    engine = engine_of(SmallModel(InPlace(), Linear()).double().eval(), ahead=True)
    assert "cannot be computed twice" in engine.note
    plain = make_engine(model_of(), "paged", async_scheduling=True)
    assert "CUDA graphs" in plain.note
    request = Request(id="a", token_ids=(1, 2), params=SamplingParams(max_new_tokens=9, ignore_eos=True))
    for waiting in (engine, plain):
        assert run_all(waiting, [request])["a", 0].error is None
        assert waiting._async.launched_ahead == 0
    assert make_engine(model_of(), "paged").note == ""
