"""A step for which memory is too small costs at most the request that does not fit; others go on, nothing is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_core.errors import OutOfCapacity
from attn_engine import FinishReason, ScoringParams
from serving import assert_empty, make_engine, run, some_requests
from small_models import small_model

SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8.00 GiB of which 1.00 GiB is free."
ERRORS = {
    "of CUDA": torch.OutOfMemoryError(SAYS),
    "of MPS": RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"),
    "of the host": MemoryError(),
}


def short_of_memory(kind: str, rows: int, error: Exception):
    """A small model whose steps of more rows than these find no memory."""
    model = small_model(kind)
    step = model.step

    def tight(tokens, batch, state):
        if len(tokens) > rows:
            raise error
        return step(tokens, batch, state)

    model.step = tight
    return model


@pytest.mark.parametrize("said", ERRORS)
@pytest.mark.parametrize(("kind", "cache"), [("hybrid", "shared"), ("slot", "contiguous"), ("paged", "paged")])
def test_requests_that_fit_alone_get_the_same_tokens(kind, cache, said):
    requests = some_requests(small_model(kind), 5, seed=3)
    alone = {request.id: run(make_engine(small_model(kind)), [request])[request.id].ids for request in requests}
    engine = make_engine(short_of_memory(kind, 30, ERRORS[said]), cache, max_num_batched_tokens=60)
    outcomes = run(engine, requests)
    assert {name: outcome.ids for name, outcome in outcomes.items()} == alone
    assert_empty(engine)
    assert not engine._isolator._alone_until


@pytest.mark.parametrize("said", ERRORS)
def test_a_request_that_does_not_fit_alone_ends_with_a_typed_error_that_says_what_helps(said):
    model = small_model("paged")
    healthy = [replace(request, token_ids=request.token_ids[:8]) for request in some_requests(model, 4, seed=1)]
    large = replace(healthy[0], id="large", token_ids=(3,) * 40)
    alone = {request.id: run(make_engine(model), [request])[request.id].ids for request in healthy}
    engine = make_engine(short_of_memory("paged", 20, ERRORS[said]), "shared", max_num_batched_tokens=60)
    outcomes = run(engine, [large, *healthy])
    assert {name: outcomes[name].ids for name in alone} == alone
    error = outcomes["large"].error
    assert type(error) is OutOfCapacity
    assert "40 tokens" in error.message
    assert "--max-num-batched-tokens" in error.message
    if said == "of CUDA":
        assert "Tried to allocate 2.00 GiB" in error.message
    assert_empty(engine)


def test_smaller_steps_fit_what_larger_ones_do_not():
    request = replace(some_requests(small_model("paged"), 1)[0], token_ids=(3,) * 40)
    tight = short_of_memory("paged", 20, ERRORS["of CUDA"])
    assert run(make_engine(tight, max_num_batched_tokens=20), [request])[request.id].error is None


def test_no_memory_for_logits_ends_the_requests_of_the_step_and_those_that_wait_go_on():
    model = small_model("paged")
    requests = some_requests(model, 6, seed=2)
    alone = {request.id: run(make_engine(model), [request])[request.id].ids for request in requests}
    logits, calls = model.logits, []

    def tight(hidden):
        calls.append(len(hidden))
        if len(calls) == 4:
            raise ERRORS["of CUDA"]
        return logits(hidden)

    model.logits = tight
    engine = make_engine(model, requests=2, max_num_seqs=2)
    outcomes = run(engine, requests)
    failed = [name for name, outcome in outcomes.items() if outcome.error is not None]
    assert 1 <= len(failed) <= 2
    for name, outcome in outcomes.items():
        if name in failed:
            assert type(outcome.error) is OutOfCapacity
            assert outcome.ids == alone[name][: len(outcome.ids)]
        else:
            assert outcome.ids == alone[name]
            assert outcome.finish_reason is FinishReason.LENGTH
    assert_empty(engine)


def test_an_encoder_input_without_memory_ends_its_request_alone():
    model = small_model("hybrid")
    first, *others = some_requests(model, 3, seed=4)
    large = replace(first, id="large", encoder_token_ids=(1,) * 9)
    others = [replace(request, encoder_token_ids=request.encoder_token_ids[:5]) for request in others]
    encode = model.encode

    def tight(source):
        if len(source) > 8:
            raise ERRORS["of CUDA"]
        return encode(source)

    model.encode = tight
    engine = make_engine(model)
    outcomes = run(engine, [large, *others])
    assert type(outcomes["large"].error) is OutOfCapacity
    assert all(outcomes[request.id].error is None for request in others)
    assert_empty(engine)


def test_a_prompt_is_scored_in_parts_whose_logits_fit(monkeypatch):
    model = small_model("paged")
    request = replace(some_requests(model, 1)[0], token_ids=tuple(range(1, 12)) * 3, params=ScoringParams())
    whole = run(make_engine(model), [request])[request.id].tokens
    monkeypatch.setattr("attn_engine.output_processor.SCORED_ROWS", 4)
    logits, rows = model.logits, []
    model.logits = lambda hidden: (rows.append(len(hidden)), logits(hidden))[1]
    parts = run(make_engine(model), [request])[request.id].tokens
    assert max(rows) == 4
    assert [token.id for token in parts] == [token.id for token in whole]
    assert [token.logprob for token in parts][1:] == pytest.approx([token.logprob for token in whole][1:], abs=1e-12)
