from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, FinishReason, Request, SamplingParams, ScoringParams
from serving import make_engine, run, some_requests
from small_models import VOCABULARY, small_model


def logits_by_prefixes(model, ids):
    """Logits [tokens, vocabulary], each from a fresh store that saw only the tokens up to there."""
    from attn_core import RaggedBatch

    rows = []
    for n in range(1, len(ids) + 1):
        store = (
            installed()
            .caches.get("contiguous")
            .create(model.state_specs(), StoreSize(tokens=96, requests=1, dtype="float64"))
        )
        store.admit(0)
        store.reserve(0, n)
        batch = RaggedBatch.of([n], [0], torch.tensor)
        with torch.no_grad():
            hidden = model.step(torch.tensor(ids[:n]), batch, store.view(batch, [0]))
            rows.append(model.logits(hidden[-1:])[0])
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["paged", "window", "slot", "replay"])
@pytest.mark.parametrize("max_num_batched_tokens", [1, 4, 256])
def test_scores_are_the_log_softmax_of_what_precedes_each_token(kind, max_num_batched_tokens):
    model = small_model(kind)
    ids = [(7 * i + 3) % VOCABULARY for i in range(14)]
    outcome = run(
        make_engine(model, max_num_batched_tokens=max_num_batched_tokens),
        [Request(id="x", token_ids=ids, params=ScoringParams(top_logprobs=3))],
    )["x"]
    expected = logits_by_prefixes(model, ids).log_softmax(-1)
    assert outcome.ids == ids
    assert outcome.finish_reason is FinishReason.LENGTH
    assert outcome.usage.completion_tokens == 0
    assert outcome.tokens[0].logprob is None
    for i in range(1, len(ids)):
        token = outcome.tokens[i]
        assert token.logprob == pytest.approx(float(expected[i - 1, ids[i]]), abs=1e-5)
        assert [top.id for top in token.top_logprobs] == expected[i - 1].topk(3).indices.tolist()


def test_scoring_one_token_says_that_nothing_precedes_it():
    outcome = run(make_engine(small_model("paged")), [Request(id="x", token_ids=(5,), params=ScoringParams())])["x"]
    assert [(t.id, t.logprob) for t in outcome.tokens] == [(5, None)]
    assert outcome.finish_reason is FinishReason.LENGTH


def test_scoring_and_generating_share_a_batch_without_touching_each_other():
    model = small_model("hybrid")
    requests = some_requests(model, 4, seed=8)
    scored = [
        Request(id=f"s{r.id}", token_ids=r.token_ids, encoder_token_ids=r.encoder_token_ids, params=ScoringParams())
        for r in requests
    ]
    apart = run(make_engine(model), requests) | run(make_engine(model), scored)
    together = run(make_engine(model, max_num_batched_tokens=9), [*requests, *scored])
    for name, outcome in together.items():
        assert outcome.ids == apart[name].ids
        for token, other in zip(outcome.tokens, apart[name].tokens, strict=True):
            assert (token.logprob is None) == (other.logprob is None)
            if token.logprob is not None:
                assert token.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_a_whole_context_can_be_scored():
    model = small_model("paged")
    store = (
        installed().caches.get("paged").create(model.state_specs(), StoreSize(tokens=96, requests=1, dtype="float64"))
    )
    engine = Engine(model, store, config=EngineConfig(max_num_batched_tokens=10))
    outcome = run(engine, [Request(id="x", token_ids=(1,) * 96, params=ScoringParams())])["x"]
    assert len(outcome.tokens) == 96


def test_scores_are_told_once_also_when_the_sequence_was_preempted_on_the_way():
    model = small_model("paged")
    grower = Request(
        id="grower", token_ids=(1,) * 15, params=SamplingParams(max_new_tokens=60, ignore_eos=True), priority=1
    )
    scored = Request(id="scored", token_ids=tuple(range(60)), params=ScoringParams())
    engine = make_engine(model, "paged", tokens=96, max_num_batched_tokens=2)
    quiet = run(make_engine(model), [scored])["scored"]
    outcomes = run(engine, [grower, scored])
    assert engine.stats().preemptions > 0
    assert engine.stats().computed_tokens > 60 + 15 + 60 - 1
    assert outcomes["scored"].ids == list(range(60))
    assert [t.logprob for t in outcomes["scored"].tokens[1:]] == pytest.approx([t.logprob for t in quiet.tokens[1:]])
