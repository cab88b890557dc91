"""Penalties, biases and the least number of tokens, against their definitions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.sampling import TokenCounts
from attn_engine.sampler import SamplingRow, process_logits
from attn_schema.sampling import ResolvedSamplingParams as Params
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import make_engine, run, some_requests
from small_models import small_model

SIZE = 12


@settings(max_examples=80, deadline=None)
@given(
    generated=st.lists(st.integers(0, SIZE - 1), max_size=20),
    frequency=st.floats(-2, 2),
    presence=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, SIZE - 1), st.floats(-100, 100), max_size=5),
    seed=st.integers(0, 99),
)
def test_penalties_and_biases_are_those_of_the_definition(generated, frequency, presence, bias, seed):
    logits = 3 * torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    sampling = Params(frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias)
    found = process_logits(logits, SamplingRow(sampling, 0, 0, TokenCounts(generated=generated)))
    for token in range(SIZE):
        times = generated.count(token)
        expected = logits[token].item() - frequency * times - presence * (times > 0) + bias.get(token, 0.0)
        assert found[token].item() == pytest.approx(expected, abs=1e-4)


def test_a_frequency_penalty_counts_generated_tokens_and_not_the_prompt():
    model = small_model("paged")
    (request,) = some_requests(model, 1)
    plain = run(make_engine(model), [request])[request.id].ids
    (penalised,) = some_requests(model, 1, frequency_penalty=2.0)
    found = run(make_engine(model), [penalised])[request.id].ids
    assert found[0] == plain[0]
    most = max(plain.count(token) for token in plain)
    assert max(found.count(token) for token in found) < most


def test_penalties_give_the_same_tokens_in_a_crowd_and_after_preemption():
    model = small_model("paged")
    requests = some_requests(model, 12, 1, frequency_penalty=0.7, presence_penalty=0.4)
    alone = {request.id: run(make_engine(model), [request])[request.id].ids for request in requests}
    engine = make_engine(model, "paged", tokens=96, max_num_batched_tokens=40)
    assert {name: outcome.ids for name, outcome in run(engine, requests).items()} == alone
    assert engine.stats().preemptions > 0


def test_a_bias_of_a_hundred_forces_a_token_and_of_minus_a_hundred_bans_it():
    model = small_model("paged")
    (forced,) = some_requests(model, 1, logit_bias={5: 100.0})
    assert set(run(make_engine(model), [forced])[forced.id].ids) == {5}
    (free,) = some_requests(model, 1)
    first = run(make_engine(model), [free])[free.id].ids[0]
    (banned,) = some_requests(model, 1, logit_bias={first: -100.0})
    assert first not in run(make_engine(model), [banned])[banned.id].ids


def test_a_suppressed_token_never_comes_however_likely_and_one_suppressed_at_the_beginning_only_later():
    model = small_model("paged")
    (request,) = some_requests(model, 1, logit_bias={5: 100.0, 6: 50.0})
    barred = dataclasses.replace(request, id="barred", suppress_tokens=frozenset({5}))
    later = dataclasses.replace(request, id="later", begin_suppress_tokens=frozenset({5}))
    found = run(make_engine(model), [request, barred, later])
    assert (set(found[request.id].ids), set(found["barred"].ids)) == ({5}, {6})
    assert (found["later"].ids[0], set(found["later"].ids[1:])) == (6, {5})
    (free,) = some_requests(model, 1)  # greedy otherwise, and with the logits of the model
    plain = run(make_engine(model), [free])[free.id].ids
    changed = dataclasses.replace(free, suppress_tokens=frozenset(plain))
    assert not set(run(make_engine(model), [changed])[free.id].ids) & set(plain)
    with pytest.raises(InvalidValue, match="suppress_tokens"):
        make_engine(model).submit(dataclasses.replace(free, suppress_tokens=frozenset({10_000})))


def test_no_end_token_comes_before_the_least_number_of_tokens():
    model = small_model("paged")
    end = 63
    (request,) = some_requests(model, 1, seed=2)
    task = Params(max_new_tokens=20, min_new_tokens=7, logit_bias={end: 100.0})
    outcome = run(make_engine(model), [type(request)(id="r", token_ids=request.token_ids, params=task)])["r"]
    assert len(outcome.ids) == 8
    assert outcome.ids[-1] == end
    assert end not in outcome.ids[:-1]
