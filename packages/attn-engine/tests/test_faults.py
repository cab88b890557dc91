"""A layer that fails for one request fails that request alone, and is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_core.errors import InternalError, LayerFailed
from attn_engine import FinishReason, Request, SamplingParams, ScoringParams
from serving import assert_empty, make_engine, run, run_all, some_requests
from small_models import WIDTH, small_model

FATAL = 28
"""The position from which on the broken layers fail."""


def cannot(out, late):
    raise RuntimeError("this\nlayer cannot")


WAYS = {
    "raises": cannot,
    "gives nothing": lambda out, late: None,
    "gives other rows": lambda out, late: out.new_zeros(len(out) + 3, WIDTH),
    "gives another width": lambda out, late: out.new_zeros(len(out), WIDTH + 1),
    "gives NaN": lambda out, late: out.masked_fill(late[:, None], torch.nan),
    "overflows": lambda out, late: out.masked_fill(late[:, None], torch.inf),
}


def broken(kind: str, way: str, layer: int = -1):
    """A small model of which one layer fails from the position `FATAL` on."""
    model = small_model(kind)
    sick = model.layers[layer]
    step = sick.step

    def fails(x, batch, state):
        out = step(x, batch, state)
        late = batch.positions >= FATAL
        return WAYS[way](out, late) if bool(late.any()) else out

    sick.step = fails
    names = [f"mechanism-{i}" for i in range(len(model.layers))]
    model.layer_mechanisms = lambda: {f"layer{i}": name for i, name in enumerate(names)}
    return model, f"layer{len(model.layers) - 1 if layer == -1 else layer}"


def crowd(model, count=5):
    """Requests of which some reach the fatal position and some do not."""
    healthy, sick = [], []
    for request in some_requests(model, count, seed=5):
        most = FATAL - len(request.token_ids)
        if most < 1 or len(sick) < 2:
            sick.append(replace(request, params=SamplingParams(max_new_tokens=max(most + 6, 6), ignore_eos=True)))
        else:
            healthy.append(replace(request, params=SamplingParams(max_new_tokens=min(most, 20), ignore_eos=True)))
    return healthy, sick


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "cache"), [("hybrid", "shared"), ("slot", "contiguous"), ("window", "paged")])
def test_the_others_of_a_step_go_on_with_the_same_tokens(kind, cache, way):
    sound = small_model(kind)
    healthy, sick = crowd(sound)
    alone = {request.id: run(make_engine(sound), [request])[request.id].ids for request in (*healthy, *sick)}
    model, layer = broken(kind, way)
    engine = make_engine(model, cache, max_num_batched_tokens=30)
    outcomes = run(engine, [*sick, *healthy])
    for request in healthy:
        assert outcomes[request.id].ids == alone[request.id]
        assert outcomes[request.id].finish_reason is FinishReason.LENGTH
    for request in sick:
        outcome = outcomes[request.id]
        assert outcome.error is not None
        assert outcome.ids == alone[request.id][: len(outcome.ids)]
        assert len(outcome.ids) == max(0, FATAL + 1 - len(request.token_ids))
        error = outcome.error
        assert isinstance(error, LayerFailed)
        assert error.metadata["layer"] == layer
        assert error.metadata["mechanism"] == f"mechanism-{layer[-1]}"
    assert_empty(engine)
    assert not engine._isolator._alone_until


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("way", ["gives NaN", "raises"])
def test_the_layer_that_is_named_is_the_first_that_went_wrong(way, layer):
    model, name = broken("hybrid", way, layer)
    _, (request, *_) = crowd(model)
    error = run(make_engine(model), [request])[request.id].error
    assert error.metadata["layer"] == name
    expected = "RuntimeError: this layer cannot" if way == "raises" else "its values are not finite"
    assert error.metadata["what"] == expected


def test_weights_that_are_no_numbers_are_named_by_their_module():
    model = small_model("paged")
    with torch.no_grad():
        model.layers[1].project.weight[0] = torch.nan
    error = run(make_engine(model), some_requests(model, 1))["r0"].error
    assert error.metadata["layer"] == "layers.1.project"


@pytest.mark.parametrize("kind", ["paged", "slot"])
def test_beams_and_completions_of_a_sick_request_end_and_others_go_on(kind):
    sound = small_model(kind)
    healthy, (first, *_) = crowd(sound)
    beams = SamplingParams(max_new_tokens=40, num_beams=3, ignore_eos=True)
    several = SamplingParams(max_new_tokens=40, n=3, temperature=0.8, seed=3, ignore_eos=True)
    score = replace(first, id="score", token_ids=(3,) * 40, params=ScoringParams())
    alone = {request.id: run(make_engine(sound), [request])[request.id].ids for request in healthy}
    for way in ("raises", "gives NaN"):
        model, layer = broken(kind, way)
        engine = make_engine(model, "shared", max_num_batched_tokens=40)
        sick = [replace(first, id="beams", params=beams), replace(first, id="several", params=several), score]
        outcomes = run_all(engine, [*sick, *healthy])
        for (name, choice), outcome in outcomes.items():
            if choice == 0 and name in alone:
                assert outcome.ids == alone[name]
            elif name not in alone:
                assert outcome.error is not None
                if choice == 0:
                    assert outcome.error.metadata["layer"] == layer
        assert_empty(engine)


def test_draft_tokens_are_rolled_back_with_the_step_that_failed():
    sound = small_model("hybrid")
    sound.place.weight.data.zero_()
    words = (5, 9, 3) * 4
    task = SamplingParams(max_new_tokens=12, ignore_eos=True, num_speculative_tokens=4)
    needs = {"encoder_token_ids": (1, 2, 3)}
    good = [Request(id=f"g{i}", token_ids=words[i:], params=task, **needs) for i in range(3)]
    alone = {request.id: run(make_engine(sound), [request])[request.id].ids for request in good}
    bad = Request(id="bad", token_ids=words, params=task.replace(max_new_tokens=40), **needs)
    model, _ = broken("hybrid", "raises")
    model.place.weight.data.zero_()
    engine = make_engine(model, "shared")
    outcomes = run(engine, [*good, bad])
    assert engine.stats().accepted_tokens > 0
    assert outcomes["bad"].error is not None
    assert {name: outcomes[name].ids for name in alone} == alone
    assert_empty(engine)


def test_a_fault_that_does_not_come_again_costs_nobody_anything():
    model = small_model("slot")
    requests = some_requests(model, 4)
    alone = {request.id: run(make_engine(model), [request])[request.id].ids for request in requests}
    step, calls = model.step, []

    def moody(*arguments):
        calls.append(1)
        hidden = step(*arguments)
        if len(calls) in (4, 11):
            raise MemoryError
        return hidden

    model.step = moody
    engine = make_engine(model, "shared", max_num_batched_tokens=20)
    assert {name: outcome.ids for name, outcome in run(engine, requests).items()} == alone
    assert len(calls) > 10
    assert_empty(engine)


def test_a_fault_before_the_first_layer_is_an_internal_error():
    model = small_model("paged")
    model.step = lambda *arguments: 1 / 0
    (outcome,) = run(make_engine(model), some_requests(model, 1)).values()
    assert type(outcome.error) is InternalError
    assert "ZeroDivisionError" in str(outcome.error)
