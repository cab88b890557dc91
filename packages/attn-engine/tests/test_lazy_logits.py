"""Greedy requests need no logits if the model finds the most likely token without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attn_engine import Request, SamplingParams
from serving import assert_empty, make_engine, run, run_all, some_requests
from small_models import KINDS, small_model

GREEDY = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
OTHERS = {
    "drawn": SamplingParams(max_new_tokens=9, temperature=1.0, seed=5, ignore_eos=True),
    "scored": SamplingParams(max_new_tokens=9, top_logprobs=2, ignore_eos=True),
    "biased": SamplingParams(max_new_tokens=9, logit_bias={3: 4.0}, ignore_eos=True),
    "punished": SamplingParams(max_new_tokens=9, repetition_penalty=1.5, ignore_eos=True),
    "kept going": SamplingParams(max_new_tokens=9, min_new_tokens=5),
    "searched": SamplingParams(max_new_tokens=9, num_beams=3),
}


class Asked:
    """A small model that finds likeliest tokens and counts the rows of which logits are asked."""

    def __init__(self, kind: str, *, finds: bool = True) -> None:
        self.model = small_model(kind)
        self.rows = 0
        kept = self.model.logits

        def logits(hidden):
            self.rows += len(hidden)
            return kept(hidden)

        def greedy_tokens(hidden):
            found = kept(hidden)
            return found.argmax(-1).where(found.amax(-1).isfinite(), -1) if finds else None

        self.model.logits, self.model.greedy_tokens = logits, greedy_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_requests_ask_for_no_logits_and_get_the_same_tokens(kind):
    asked = Asked(kind)
    requests = [replace(request, params=GREEDY) for request in some_requests(asked.model, 6, seed=2)]
    found = run(make_engine(asked.model), requests, every=2)
    expected = run(make_engine(small_model(kind)), requests, every=2)
    assert asked.rows == 0
    assert {name: outcome.ids for name, outcome in found.items()} == {n: o.ids for n, o in expected.items()}


@pytest.mark.parametrize("finds", [True, False])
@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_requests_that_need_logits_get_theirs_beside_those_that_do_not(num_speculative_tokens, finds):
    asked = Asked("paged", finds=finds)
    tasks = {"greedy": GREEDY, **OTHERS, "again": GREEDY.replace(n=3)}
    requests = [
        Request(
            id=name,
            token_ids=(1, 2, 3, 1, 2),
            params=task if task.num_beams > 1 else task.replace(num_speculative_tokens=num_speculative_tokens),
        )
        for name, task in tasks.items()
    ]
    engine = make_engine(asked.model, "shared", requests=16)
    found, expected = run_all(engine, requests), run_all(make_engine(small_model("paged"), requests=16), requests)
    assert {key: outcome.tokens for key, outcome in found.items() if key[0] != "scored"} == {
        key: outcome.tokens for key, outcome in expected.items() if key[0] != "scored"
    }
    one, other = found["scored", 0].tokens, expected["scored", 0].tokens
    assert [token.id for token in one] == [token.id for token in other]
    assert [token.logprob for token in one] == pytest.approx([token.logprob for token in other])
    assert_empty(engine)


def test_a_model_that_cannot_tell_is_asked_for_logits():
    asked = Asked("paged", finds=False)
    found = run(make_engine(asked.model), [Request(id="a", token_ids=(5, 6), params=GREEDY)])
    expected = run(make_engine(small_model("paged")), [Request(id="a", token_ids=(5, 6), params=GREEDY)])
    assert asked.rows == GREEDY.max_new_tokens
    assert found["a"].ids == expected["a"].ids


def test_a_row_without_a_greedy_token_fails_alone():
    asked = Asked("paged")
    kept = asked.model.greedy_tokens
    asked.model.greedy_tokens = lambda hidden: kept(hidden).where(torch.arange(len(hidden)) != 1, -1)
    requests = [Request(id=name, token_ids=(4, 5), params=GREEDY) for name in "ab"]
    found = run(make_engine(asked.model), requests)
    assert [found[name].finish_reason for name in "ab"] == ["length", None]
    assert [len(found[name].ids) for name in "ab"] == [12, 0]
