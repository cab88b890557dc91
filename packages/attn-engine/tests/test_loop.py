from __future__ import annotations

import threading
import time

import pytest
from attn_core.errors import AlreadyExists, InvalidValue, OutOfCapacity, Unavailable
from attn_engine import EngineLoop, FinishReason, Request, SamplingParams
from serving import assert_empty, make_engine, run, some_requests
from small_models import small_model


def endless(name: str, tokens: int = 90) -> Request:
    return Request(id=name, token_ids=(1, 2), params=SamplingParams(max_new_tokens=tokens, ignore_eos=True))


def waits_until(condition, seconds: float = 20) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)
    return bool(condition())


def test_streams_from_many_threads_equal_a_quiet_run():
    model = small_model("hybrid")
    requests = some_requests(model, 12, seed=11)
    quiet = run(make_engine(model), requests)
    engine = make_engine(model, requests=4)
    texts: dict[str, str] = {}
    with EngineLoop(engine) as loop:
        threads = [
            threading.Thread(target=lambda r=r: texts.update({r.id: "".join(e.delta.text for e in loop.stream(r))}))
            for r in requests
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert texts == {name: outcome.text for name, outcome in quiet.items()}
    assert_empty(engine)


def test_leaving_a_stream_cancels_the_request():
    engine = make_engine(small_model("paged"))
    with EngineLoop(engine) as loop:
        stream = loop.stream(endless("x"))
        next(stream)
        stream.close()
        assert loop.drain(timeout=60)
    assert_empty(engine)


def test_a_cancellation_from_another_thread_takes_effect_within_one_step():
    engine = make_engine(small_model("paged"))
    events, cancelled_at = [], []
    seen = threading.Event()
    with EngineLoop(engine) as loop:

        def deliver(event):
            events.append(event)
            if len(events) == 3:
                canceller = threading.Thread(target=lambda: (loop.cancel("x"), cancelled_at.append(len(events))))
                canceller.start()
                canceller.join()
            if event.ended:
                seen.set()

        loop.submit(endless("x"), deliver)
        assert seen.wait(60)
    assert isinstance(events[-1].error, Unavailable)
    assert len(events) == cancelled_at[0] + 1


def test_listeners_get_all_events_of_a_step_at_once():
    steps = []
    engine = make_engine(small_model("paged"))
    with EngineLoop(engine, listen=lambda events: steps.append([event.request_id for event in events])) as loop:
        for name in ("a", "b", "c"):
            loop.submit(endless(name, 30))
        assert loop.drain(timeout=60)
    assert any(sorted(step) == ["a", "b", "c"] for step in steps)
    assert sum(map(len, steps)) == 90


def test_what_an_engine_refuses_is_raised_to_the_caller():
    engine = make_engine(small_model("paged"), requests=1, max_queued_requests=1)
    with EngineLoop(engine) as loop:
        with pytest.raises(InvalidValue):
            loop.submit(Request(id="x", token_ids=()))
        loop.submit(endless("a"))
        with pytest.raises(AlreadyExists):
            loop.submit(endless("a"))
        assert waits_until(lambda: loop.stats().running == 1)
        loop.submit(endless("b"))
        with pytest.raises(OutOfCapacity):
            loop.submit(endless("c"))


def test_stopping_cancels_what_runs_and_tells_it():
    engine = make_engine(small_model("paged"))
    errors = {}
    loop = EngineLoop(engine)
    for name in ("a", "b"):
        loop.submit(endless(name), lambda e: errors.update({e.request_id: e.error}) if e.ended else None)
    loop.stop()
    assert {name: type(error) for name, error in errors.items()} == dict.fromkeys("ab", Unavailable)
    with pytest.raises(Unavailable):
        loop.submit(endless("c"))
    assert_empty(engine)
    assert not loop.alive


def test_draining_waits_for_the_end_and_takes_nothing_new():
    with EngineLoop(make_engine(small_model("paged"))) as loop:
        finished = []
        loop.submit(endless("a", 20), lambda e: finished.append(e.delta.finish_reason) if e.ended else None)
        assert loop.drain(timeout=60)
        assert finished == [FinishReason.LENGTH]
        with pytest.raises(Unavailable):
            loop.submit(endless("b"))


def test_a_step_that_fails_ends_its_requests_and_the_loop_goes_on():
    model = small_model("paged")
    engine = make_engine(model)
    step = model.step
    model.step = lambda *arguments: 1 / 0
    with EngineLoop(engine) as loop:
        (event,) = list(loop.stream(endless("a")))
        assert event.error is not None
        assert "ZeroDivisionError" in str(event.error)
        model.step = step
        assert list(loop.stream(endless("b", 5)))[-1].delta.finish_reason is FinishReason.LENGTH
    assert_empty(engine)


def test_a_receiver_that_raises_loses_its_request_and_harms_nobody_else():
    engine = make_engine(small_model("paged"))
    with EngineLoop(engine) as loop:
        told = []

        def broken(event):
            told.append(event)
            raise ValueError("receiver")

        loop.submit(endless("bad"), broken)
        events = list(loop.stream(endless("good", 20)))
        assert events[-1].delta.finish_reason is FinishReason.LENGTH
        assert loop.drain(timeout=60)
    assert isinstance(told[-1].error, Unavailable)
    assert len(told) == 2
    assert_empty(engine)


def test_an_idle_loop_computes_nothing():
    engine = make_engine(small_model("paged"))
    steps = []
    step = engine.step
    engine.step = lambda: steps.append(1) or step()
    with EngineLoop(engine):
        time.sleep(0.1)
        assert steps == []
