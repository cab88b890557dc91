"""Requests that cannot be completed in time are refused before they cost anything, and nobody else is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from attn_core.errors import DeadlineExceeded, OutOfCapacity, UserError
from attn_engine import Engine, EngineConfig, Request, SamplingParams
from attn_engine.admission import (
    MAX_PLANNED_SHARE,
    MIN_PLANNED_SHARE,
    MIN_STEPS,
    MISS_FACTOR,
    AdmissionControl,
    StepCost,
)
from attn_schema import StructuredOutput
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import make_engine
from small_models import small_model

FIXED, PER_TOKEN = 0.010, 0.001


def asked(name: str, *, tenant: str = "", deadline: float | None = None, prompt: int = 4, new: int = 8) -> Request:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return Request(id=name, token_ids=(1,) * prompt, params=params, tenant=tenant, deadline=deadline, scope=None)


def control(limit: int = 1000, sequences: int = 4, **weights: float) -> AdmissionControl:
    """One that has measured steps of FIXED seconds and PER_TOKEN for each token."""
    config = EngineConfig(
        max_num_seqs=sequences, max_num_batched_tokens=64, max_queued_requests=limit, tenant_weights=weights
    )
    made = AdmissionControl(config)
    for tokens in (1, 64, 4, 32, 2, 16, 8):
        made.computed({"before": (tokens, 0)}, FIXED + PER_TOKEN * tokens)
    return made


class Clock:
    """A time that passes only with the work of an engine: what each step costs is known exactly."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(
    arrivals: list[tuple[float, Request]], sequences: int = 4, slowness: Callable[[float], float] = lambda now: 1.0
) -> tuple[dict[str, str], int]:
    """What becomes of each request, and how many tokens were computed, where a step takes time as its tokens say.

    `slowness` is the factor of that time at a time; a request that was admitted and refused after all ends "given up".
    """
    clock = Clock()
    engine = make_engine(small_model("paged"), requests=sequences, clock=clock, max_num_seqs=sequences)
    runner, run_model = engine._runner, engine._runner.run

    def run(chunks):
        clock.now += (FIXED + PER_TOKEN * sum(chunk.rows for chunk in chunks)) * slowness(clock.now)
        return run_model(chunks)

    runner.run = run
    ended, queue = {}, list(arrivals)
    while queue or not engine.idle:
        if engine.idle:
            clock.now = max(clock.now, queue[0][0])
        while queue and queue[0][0] <= clock.now:
            request = queue.pop(0)[1]
            try:
                engine.submit(request)
            except OutOfCapacity:
                ended[request.id] = "refused"
        for output in engine.step():
            if output.last:
                kind = type(output.error).__name__ if output.error else "done"
                ended[output.request_id] = "given up" if kind == "OutOfCapacity" else kind
    return ended, engine.stats().computed_tokens


def test_the_cost_of_a_step_is_found_from_steps_of_several_sizes():
    cost = StepCost()
    for tokens in [1, 5, 64, 3, 20] * 4:
        cost.measured(tokens, FIXED + PER_TOKEN * tokens)
    assert cost.seconds(100) == pytest.approx(FIXED + 100 * PER_TOKEN)
    assert cost.seconds(100, steps=10) == pytest.approx(10 * FIXED + 100 * PER_TOKEN)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 1)), min_size=1, max_size=30))
def test_no_measurement_makes_work_free_or_negative(steps):
    cost = StepCost()
    for tokens, seconds in steps:
        cost.measured(tokens, seconds)
    assert 0 <= cost.seconds(1) <= cost.seconds(2)
    assert cost.seconds(300, steps=300) > 0


def test_one_step_in_which_the_machine_slept_is_no_pace_and_a_slow_machine_is_believed_soon():
    cost = StepCost()
    for tokens in [1, 5, 64, 3, 20] * 4:
        cost.measured(tokens, FIXED + PER_TOKEN * tokens)
    cost.measured(8, 60.0)
    assert cost.seconds(8) < 2 * (FIXED + 8 * PER_TOKEN)
    for _ in range(20):
        cost.measured(8, 1.0)
    assert cost.seconds(8) > 0.4


def test_a_request_whose_deadline_cannot_be_met_is_refused_at_once_with_a_time_to_retry():
    admission = control()
    for number in range(20):
        admission.admit(asked(f"r{number}"), 8, now=0.0)
    with pytest.raises(OutOfCapacity, match="too late") as caught:
        admission.admit(asked("late", deadline=0.05), 8, now=0.0)
    assert float(caught.value.metadata["retry_seconds"]) > 0
    admission.admit(asked("patient", deadline=60), 8, now=0.0)


def test_an_idle_engine_takes_what_comes_however_slow_it_once_was():
    admission = control()
    for _ in range(4 * MIN_STEPS):
        admission.computed({}, 100.0)
    admission.admit(asked("first", deadline=1), 8, now=0.0)
    with pytest.raises(OutOfCapacity):
        admission.admit(asked("second", deadline=1), 8, now=0.0)


def test_a_flood_of_one_tenant_refuses_nothing_of_another():
    admission = control(limit=10)
    refused = 0
    for number in range(40):
        try:
            admission.admit(asked(f"flood{number}", tenant="loud"), 8, now=0.0)
        except OutOfCapacity:
            refused += 1
    assert refused
    for number in range(3):
        admission.admit(asked(f"quiet{number}", tenant="calm", deadline=2.0), 8, now=0.0)


def test_however_many_tenants_there_are_the_queue_is_bounded():
    admission = control(limit=10)
    admitted = 0
    for number in range(100):
        try:
            admission.admit(asked(f"r{number}", tenant=str(number)), 8, now=0.0)
            admitted += 1
        except OutOfCapacity:
            pass
    assert admitted <= 20


def test_within_a_tenant_the_earliest_deadline_is_served_first():
    engine = make_engine(small_model("paged"), requests=1, max_num_seqs=1)
    now = engine._clock()
    for name, seconds in (("running", 500), ("c", 30), ("a", 10), ("b", 20), ("none", None)):
        engine.submit(asked(name, deadline=None if seconds is None else now + seconds))
        engine.step()
    order = []
    while not engine.idle:
        order += [output.request_id for output in engine.step() if output.last]
    assert order == ["running", "a", "b", "c", "none"]


def test_what_has_no_deadline_is_passed_for_no_longer_than_a_minute():
    clock = Clock()
    engine = make_engine(small_model("paged"), requests=1, max_num_seqs=1, clock=clock)
    engine.submit(asked("running"))
    engine.step()
    engine.submit(asked("patient"))
    clock.now = 61.0
    engine.submit(asked("urgent", deadline=clock.now + 0.5))
    order = []
    while not engine.idle:
        order += [output.request_id for output in engine.step() if output.last]
    assert order == ["running", "patient", "urgent"]


def test_what_expired_while_it_waited_is_dropped_before_it_costs_anything():
    clock = Clock()
    engine = make_engine(small_model("paged"), requests=1, max_num_seqs=1, clock=clock)
    engine.submit(asked("running", new=20))
    engine.step()
    for number in range(5):
        engine.submit(asked(f"w{number}", deadline=clock.now + 1))
    before = engine.stats().computed_tokens
    clock.now += 2
    outputs = engine.step()
    assert {type(output.error) for output in outputs if output.last} == {DeadlineExceeded}
    assert engine.stats().computed_tokens == before + 1


def goodput(load: float, seed: int = 0, count: int = 250) -> tuple[float, int]:
    """Tokens a second of requests that ended before their deadline, and the tokens computed for nobody."""
    rng = random.Random(seed)
    time, arrivals = 0.0, []
    # At most 4 sequences decode at once: 4 tokens in FIXED + 4 * PER_TOKEN seconds; a request also computes its prompt.
    capacity = 1 / (8 * (FIXED + 4 * PER_TOKEN) / 4 + 16 * PER_TOKEN)
    for number in range(int(count * max(load, 1))):
        time += rng.expovariate(load * capacity)
        arrivals.append((time, asked(f"r{number}", prompt=16, new=8, deadline=time + 0.6)))
    ended, computed = simulate(arrivals)
    done = sum(kind == "done" for kind in ended.values())
    return done * 8 / time, computed - done * (16 + 7)


def test_goodput_at_five_times_the_load_is_at_least_nine_tenths_of_that_at_one():
    once, _ = goodput(1.0)
    for load in (2.0, 5.0, 10.0):
        often, wasted = goodput(load)
        assert often >= 0.9 * once, load
        assert wasted <= 0.1 * 23 * 250 * load


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("deadline", [2.0, 20.0])
def test_on_a_machine_whose_speed_changes_few_are_refused_after_they_have_waited(deadline: float, seed: int) -> None:
    """Steps take four times as long as usual here, and every few seconds more or less by half."""
    rng = random.Random(seed)
    factors = [4 * rng.choice((1.0, 1.5)) for _ in range(100)]

    def ended(load: float) -> Counter[str]:
        capacity, now, arrivals = 1 / (8 * (FIXED + 4 * PER_TOKEN) / 4 + 4 * PER_TOKEN) / 5, 0.0, []
        while (now := now + rng.expovariate(load * capacity)) < 60:
            arrivals.append((now, asked(f"r{now}", deadline=now + deadline)))
        return Counter(
            simulate(arrivals, slowness=lambda at: factors[int(at / 4)] * rng.uniform(0.8, 1.25))[0].values()
        )

    once, often = ended(1.0), ended(5.0)
    assert often["done"] >= 0.9 * once["done"]
    assert often["given up"] <= 0.03 * (often["refused"] + often["given up"])
    assert often["DeadlineExceeded"] <= 0.02 * often["done"]


def test_requests_that_can_be_completed_in_time_are_not_refused():
    arrivals = [(0.5 * n, asked(f"r{n}", deadline=0.5 * n + 0.4, prompt=16)) for n in range(40)]
    ended, _ = simulate(arrivals)
    assert set(ended.values()) == {"done"}


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_admission_forgets_every_request_that_has_ended(seed):
    rng = random.Random(seed)
    engine = make_engine(small_model("paged"), requests=2, max_num_seqs=2)
    for number in range(12):
        deadline = engine._clock() + rng.choice([0.0, 0.01, 100]) if rng.random() < 0.7 else None
        try:
            engine.submit(asked(f"r{number}", deadline=deadline, new=rng.randint(1, 6)))
        except OutOfCapacity:
            continue
        engine.step()
        if rng.random() < 0.3:
            engine.cancel(f"r{rng.randint(0, number)}")
    while not engine.idle:
        engine.step()
    assert not engine.admission._entries
    assert not engine.admission._waiting


def ended_with(engine: Engine, request: Request) -> Exception | None:
    try:
        engine.submit(request)
    except UserError as error:
        return error
    while not engine.idle:
        for output in engine.step():
            if output.last:
                return output.error
    return None


@pytest.mark.parametrize("grammar", ["€+", "a#", "[ab]€?€"])
def test_a_grammar_that_the_vocabulary_cannot_spell_is_the_callers_mistake(grammar):
    engine = make_engine(small_model("paged"))
    params = SamplingParams(max_new_tokens=8, structured_output=StructuredOutput(regex=grammar))
    error = ended_with(engine, Request(id="x", token_ids=(1, 2), params=params))
    assert isinstance(error, UserError)
    assert "vocabulary" in error.message
    assert "Traceback" not in error.message


def plan(missed: bool, count: int = 200) -> float:
    """The share of its time that a waiting request is planned to take, after requests that all missed or all met."""
    admission = control()
    for number in range(count):
        admission.admit(asked(f"r{number}", deadline=100.0), 8, now=0.0)
        admission.left(f"r{number}", None if missed else 8, now=100.0)
    return admission._planned_share


def test_where_deadlines_are_missed_less_is_planned_and_where_they_are_met_as_much_as_before():
    assert plan(missed=True) == MIN_PLANNED_SHARE
    assert plan(missed=False) == MAX_PLANNED_SHARE


def test_a_cancel_after_the_end_says_that_the_last_tokens_came_too_late():
    admission = control()
    admission.admit(asked("r", deadline=1.0), 8, now=0.0)
    admission.left("r", 8, now=0.9)
    before = admission._planned_share
    admission.left("r", now=1.0)
    assert admission._planned_share < before
    admission.left("r", now=1.1)
    admission.left("unknown", now=1.1)
    assert admission._planned_share == pytest.approx(before * MISS_FACTOR)


def test_a_caller_who_leaves_early_has_not_missed_a_deadline():
    admission = control()
    admission.admit(asked("r", deadline=1.0), 8, now=0.0)
    admission.left("r", now=0.1)
    assert admission._planned_share == MAX_PLANNED_SHARE
