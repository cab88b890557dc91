from __future__ import annotations

import math

import pytest
from attn_core.errors import AlreadyExists, ContextLengthExceeded, InvalidValue, OutOfCapacity, Unavailable
from attn_engine import EngineConfig, Request, SamplingParams, ScoringParams
from serving import assert_empty, make_engine, run, some_requests
from small_models import CONTEXT, VOCABULARY, small_model


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (math.nan, math.inf, -1, -math.inf, "hot", True)),
        *(("top_p", value) for value in (0, 1.5, math.nan, -0.1)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("top_k", value) for value in (-5, 2.5)),
        *(("repetition_penalty", value) for value in (0, -1, math.nan, math.inf)),
        *(("seed", value) for value in (-1, 2**64, 2**200, 1.5)),
        *(("max_new_tokens", value) for value in (0, -1, 1.5)),
        *(("top_logprobs", value) for value in (-1, 21)),
        *(("stop", ["x"] * count) for count in (17, 5000)),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_name(field, value):
    with pytest.raises(InvalidValue, match=f"^{field}: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.metadata["field"] == field


def test_an_empty_stop_string_is_refused_by_its_place():
    with pytest.raises(InvalidValue, match=r"^stop\[1\]"):
        SamplingParams(stop=("a", ""))


@pytest.mark.parametrize("value", [-1, 21])
def test_scoring_checks_its_alternatives(value):
    with pytest.raises(InvalidValue, match=r"^top_logprobs"):
        ScoringParams(top_logprobs=value)


@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**31, 2**70, 1.5, True, "7"])
def test_a_token_outside_the_vocabulary_is_refused_by_its_place(bad):
    engine = make_engine(small_model("paged"))
    with pytest.raises(InvalidValue, match=r"^token_ids\[2\]"):
        engine.submit(Request(id="x", token_ids=(1, 2, bad, 3), params=SamplingParams(max_new_tokens=1)))
    assert engine.idle


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidValue, match=r"^token_ids"):
        make_engine(small_model("paged")).submit(Request(id="x", token_ids=()))


def test_a_prompt_that_leaves_no_room_is_refused_with_the_three_numbers():
    engine = make_engine(small_model("paged"))
    with pytest.raises(ContextLengthExceeded) as caught:
        engine.submit(Request(id="x", token_ids=(1,) * 90, params=SamplingParams(max_new_tokens=7)))
    assert caught.value.metadata == {"prompt_tokens": "90", "max_new_tokens": "7", "max_seq_len": str(CONTEXT)}
    run(engine, [Request(id="x", token_ids=(1,) * 90, params=SamplingParams(max_new_tokens=6, ignore_eos=True))])


@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])
def test_a_request_that_the_store_could_never_hold_is_refused_at_once(cache):
    engine = make_engine(small_model("paged"), cache, tokens=32, requests=1)
    with pytest.raises(InvalidValue, match="33 tokens"):
        engine.submit(Request(id="x", token_ids=(1,) * 30, params=SamplingParams(max_new_tokens=3)))
    run(engine, [Request(id="x", token_ids=(1,) * 30, params=SamplingParams(max_new_tokens=2, ignore_eos=True))])


def test_a_source_is_asked_for_where_the_model_has_one_and_only_there():
    with pytest.raises(InvalidValue, match=r"^encoder_token_ids"):
        make_engine(small_model("source")).submit(Request(id="x", token_ids=(1,)))
    with pytest.raises(InvalidValue, match=r"^encoder_token_ids\[0\]"):
        make_engine(small_model("source")).submit(Request(id="x", token_ids=(1,), encoder_token_ids=(999,)))
    with pytest.raises(InvalidValue, match=r"^encoder_token_ids: '13 tokens'.*at most 12"):
        make_engine(small_model("source")).submit(Request(id="x", token_ids=(1,), encoder_token_ids=(1,) * 13))
    with pytest.raises(InvalidValue, match=r"^encoder_token_ids: 'no tokens'"):
        make_engine(small_model("source")).submit(Request(id="x", token_ids=(1,), encoder_token_ids=()))
    with pytest.raises(InvalidValue, match=r"^encoder_token_ids"):
        make_engine(small_model("paged")).submit(Request(id="x", token_ids=(1,), encoder_token_ids=(1,)))


def test_an_id_in_use_is_refused_until_its_request_has_ended():
    engine = make_engine(small_model("paged"))
    request = some_requests(small_model("paged"), 1)[0]
    engine.submit(request)
    with pytest.raises(AlreadyExists, match=request.id):
        engine.submit(request)
    while not engine.idle:
        engine.step()
    engine.submit(request)


def test_more_waiting_requests_than_allowed_are_refused():
    model = small_model("paged")
    engine = make_engine(model, requests=1, max_queued_requests=2)
    first, second, third, fourth = some_requests(model, 4)
    engine.submit(first)
    engine.step()
    engine.submit(second)
    engine.submit(third)
    with pytest.raises(OutOfCapacity, match="2 requests"):
        engine.submit(fourth)


def test_a_draining_engine_finishes_what_it_has_and_takes_nothing_new():
    model = small_model("paged")
    engine = make_engine(model)
    first, second = some_requests(model, 2)
    engine.submit(first)
    engine.drain()
    with pytest.raises(Unavailable):
        engine.submit(second)
    finishes = []
    while not engine.idle:
        finishes += [event.delta.finish_reason for event in engine.step() if event.ended]
    assert finishes == ["length"]
    assert_empty(engine)


def test_stop_strings_without_a_tokenizer_are_refused():
    engine = make_engine(small_model("paged"), tokenizer=None)
    with pytest.raises(InvalidValue, match=r"^stop"):
        engine.submit(Request(id="x", token_ids=(1,), params=SamplingParams(max_new_tokens=9, stop=("a",))))


@pytest.mark.parametrize("field", ["max_num_batched_tokens", "max_queued_requests"])
def test_limits_of_nothing_are_refused(field):
    with pytest.raises(InvalidValue, match=field):
        EngineConfig(**{field: 0})
