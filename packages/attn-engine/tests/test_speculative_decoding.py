"""Speculative decoding changes the number of steps and nothing else, whatever must be rolled back."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from attn_core import RaggedBatch, installed
from attn_core.errors import InvalidValue
from attn_core.stores import StoreSize
from attn_engine import EngineConfig, Request, SamplingParams, ScoringParams, StructuredOutput
from attn_engine.draft_tokens import FIRST_DRAFT, LONGEST_DRAFT, LONGEST_PAUSE, DraftLength, PromptLookup
from hypothesis import given
from hypothesis import strategies as st
from serving import assert_empty, make_engine, run_all, some_requests
from small_models import JSON, KINDS, VOCABULARY, small_model


def repeating(kind: str):
    """A model that likes to say again what it has said."""
    model = small_model(kind)
    model.place.weight.data.zero_()
    return model


def wordy(model, count: int, seed: int = 0, **sampling) -> list[Request]:
    rng = random.Random(seed)
    sampling = {"ignore_eos": True, "num_speculative_tokens": 4} | sampling
    requests = []
    for number, request in enumerate(some_requests(model, count, seed)):
        words = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 4))]
        given = sampling | ({"temperature": 0.3, "seed": number} if number % 2 else {})
        task = SamplingParams(max_new_tokens=rng.randint(10, 24), **given)
        requests.append(replace(request, token_ids=tuple(words * 5), params=task))
    return requests


def plainly(model, requests, **engine):
    """The tokens of each request alone, without draft tokens."""
    found = {}
    for request in requests:
        task = request.params.replace(num_speculative_tokens=0)
        outcomes = run_all(make_engine(model, **engine), [replace(request, params=task)])
        found |= {key: outcome.ids for key, outcome in outcomes.items()}
    return found


def ids_of(outcomes):
    return {key: outcome.ids for key, outcome in outcomes.items()}


@pytest.mark.parametrize(
    ("kind", "cache"),
    [*((kind, "shared") for kind in KINDS), ("hybrid", "contiguous"), ("window", "paged"), ("paged", "contiguous")],
)
def test_draft_tokens_change_no_token(kind, cache):
    model = repeating(kind)
    requests = wordy(model, 5)
    engine = make_engine(model, cache, max_num_batched_tokens=40)
    assert ids_of(run_all(engine, requests, every=2)) == plainly(model, requests)
    assert engine.stats().draft_tokens > engine.stats().accepted_tokens > 0
    assert_empty(engine)


def test_accepted_draft_tokens_save_steps():
    model = repeating("paged")
    (request,) = wordy(model, 1, seed=2)
    task = SamplingParams(max_new_tokens=60, ignore_eos=True)
    steps = {}
    for draft_tokens in (0, 4):
        engine = make_engine(model)
        engine.submit(replace(request, params=task.replace(num_speculative_tokens=draft_tokens)))
        steps[draft_tokens] = sum(1 for _ in iter(lambda e=engine: e.step() if not e.idle else None, None))
    assert steps[0] == 60
    assert steps[4] < 45


def test_preemption_and_little_room_change_nothing():
    model = repeating("window")
    requests = wordy(model, 8, seed=3)
    engine = make_engine(model, "paged", tokens=112, max_num_batched_tokens=30)
    assert ids_of(run_all(engine, requests)) == plainly(model, requests)
    assert engine.stats().preemptions > 0
    assert engine.stats().accepted_tokens > 0
    assert_empty(engine)


def test_penalties_grammars_logprobs_and_ends_hold_for_draft_tokens():
    model = repeating("hybrid")
    for options in (
        {"repetition_penalty": 1.1, "frequency_penalty": 0.3},
        {"top_logprobs": 2},
        {"ignore_eos": False, "min_new_tokens": 6},
        {"n": 2, "temperature": 0.4, "seed": 9},
    ):
        requests = (
            wordy(model, 2, seed=6, **options)
            if "seed" not in options
            else [
                replace(r, params=SamplingParams(max_new_tokens=14, num_speculative_tokens=5, **options))
                for r in wordy(model, 2, seed=6)
            ]
        )
        assert ids_of(run_all(make_engine(model), requests)) == plainly(model, requests)
    pairs = StructuredOutput(regex="(ab){3,12}c")
    request = Request(
        id="g",
        token_ids=(1, 2, 3),
        params=SamplingParams(max_new_tokens=30, structured_output=pairs, num_speculative_tokens=6),
    )
    paged = repeating("paged")
    engine = make_engine(paged, tokenizer=JSON)
    assert ids_of(run_all(engine, [request])) == plainly(paged, [request], tokenizer=JSON)
    assert engine.stats().accepted_tokens > 0


def test_a_crowd_of_every_sort_of_request_gets_what_each_gets_alone():
    model = repeating("hybrid")
    drafted = wordy(model, 4, seed=4)
    beams = replace(drafted[0], id="beams", params=SamplingParams(max_new_tokens=6, num_beams=3, ignore_eos=True))
    score = replace(drafted[1], id="score", params=ScoringParams())
    alone = {}
    for request in (*drafted, beams, score):
        alone |= ids_of(run_all(make_engine(model), [request]))
    engine = make_engine(model, "shared", max_num_batched_tokens=25)
    assert ids_of(run_all(engine, [*drafted, beams, score], every=1)) == alone
    assert_empty(engine)


def test_a_stop_string_inside_a_draft_ends_the_text():
    model = repeating("paged")
    (request,) = wordy(model, 1, seed=2)
    whole = run_all(make_engine(model), [replace(request, params=SamplingParams(max_new_tokens=30, ignore_eos=True))])
    stop = whole[request.id, 0].text[12:15]
    texts = set()
    for draft_tokens in (0, 6):
        task = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=(stop,), num_speculative_tokens=draft_tokens)
        engine = make_engine(model)
        outcome = run_all(engine, [replace(request, params=task)])[request.id, 0]
        assert outcome.stop_reason == stop
        texts.add((outcome.text, tuple(outcome.ids)))
        assert_empty(engine)
    assert len(texts) == 1


def logits_of(model, tokens: list[int]) -> torch.Tensor:
    """What follows these tokens [vocabulary], computed in one piece."""
    store = (
        installed()
        .caches.get("contiguous")
        .create(model.state_specs(), StoreSize(tokens=96, requests=1, dtype="float64"))
    )
    store.admit(0)
    store.reserve(0, len(tokens))
    batch = RaggedBatch.of([len(tokens)], [0], torch.tensor)
    with torch.inference_mode():
        return model.logits(model.step(torch.tensor(tokens), batch, store.view(batch, [0])))[-1]


def exact(model, prompt: tuple[int, ...], words: tuple[int, ...], count: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of so many words, if only these words may come."""
    found = {}
    with torch.inference_mode():
        for continuation in itertools.product(words, repeat=count):
            share = 1.0
            for place, word in enumerate(continuation):
                p = logits_of(model, [*prompt, *continuation[:place]])[list(words)].softmax(-1)
                share *= float(p[words.index(word)])
            found[continuation] = share
    return found


CHI_SQUARE_999_OF_26 = 54.05


def test_samples_with_drafts_from_the_text_pass_a_chi_square_test():
    model = repeating("paged")
    prompt, words = (1, 2, 3, 2, 1, 3, 1, 2), (1, 2, 3)
    only = {token: -100.0 for token in range(VOCABULARY) if token not in words} | dict.fromkeys(words, 50.0)
    task = SamplingParams(max_new_tokens=3, temperature=1.0, logit_bias=only, num_speculative_tokens=2, ignore_eos=True)
    requests = [Request(id=str(i), token_ids=prompt, params=task.replace(seed=i)) for i in range(1500)]
    engine = make_engine(
        model, "shared", requests=64, tokens=96 * 64, max_num_batched_tokens=1024, max_queued_requests=2000
    )
    found = [tuple(outcome.ids) for outcome in run_all(engine, requests).values()]
    assert engine.stats().accepted_tokens > 100
    expected = exact(model, prompt, words, 3)
    likely = {key: share * len(found) for key, share in expected.items()}
    assert sum((found.count(key) - n) ** 2 / n for key, n in likely.items()) < CHI_SQUARE_999_OF_26


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 5))
def test_a_draft_is_what_followed_the_longest_match(tokens, most):
    grown = PromptLookup()
    for end in range(1, len(tokens) + 1):
        found = grown.draft(tokens[:end], most).tokens
    expected: list[int] = []
    for length in range(min(3, len(tokens)), 0, -1):
        starts = [i for i in range(len(tokens) - length) if tokens[i : i + length] == tokens[-length:]]
        if starts:
            expected = tokens[starts[-1] + length :][:most]
            break
    assert found == tuple(expected) == PromptLookup().draft(tokens, most).tokens


def drafts_of(right):
    """Lengths of the drafts in a text of 2000 tokens where `right(length)` tokens of a draft are accepted."""
    length, tokens, accepted, found = DraftLength(), 100, 0, []
    while tokens < 2100:
        count = length.next(tokens, accepted)
        if count:
            length.proposed(count)
            found.append(count)
        tokens += 1 + right(count)
        accepted += right(count)
    return found


def test_drafts_grow_while_they_are_accepted():
    found = drafts_of(lambda count: count)
    assert found[:3] == [FIRST_DRAFT, 2 * FIRST_DRAFT, 4 * FIRST_DRAFT]
    assert set(found[2:]) == {LONGEST_DRAFT}
    assert sum(found) + len(found) >= 2000


def test_drafts_that_are_always_rejected_become_rare():
    found = drafts_of(lambda count: 0)
    assert set(found) == {FIRST_DRAFT}
    assert 2000 / LONGEST_PAUSE - 2 < len(found) < 2000 / LONGEST_PAUSE + 6


def test_tokens_whose_bytes_meet_between_two_others_are_not_taken_for_them():
    """A text of bytes is searched: 1, then 256 holds the bytes of 65536 between its tokens."""
    assert PromptLookup().draft([1, 0x01000000, 0, 5, 1 << 16], 3).tokens == ()
    assert PromptLookup().draft([9, 0x01000000, 0, 5, 1], 3).tokens == ()
    assert PromptLookup().draft([9, 1, 6, 5, 1], 3).tokens == (6, 5, 1)


@pytest.mark.parametrize("value", [-1, 33, 1.5, True])
def test_a_number_of_draft_tokens_out_of_range_is_refused(value):
    with pytest.raises(InvalidValue, match=r"^num_speculative_tokens: "):
        SamplingParams(num_speculative_tokens=value)
    if not isinstance(value, float | bool):
        with pytest.raises(InvalidValue, match=r"^num_speculative_tokens: "):
            EngineConfig(num_speculative_tokens=value)
