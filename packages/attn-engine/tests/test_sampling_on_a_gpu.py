"""Requests get on a GPU, where a batch is sampled at once, what they get on a CPU. The GPU is pretended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_core import installed
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams, batch_sampler
from attn_engine.graphs import Rerun, StepGraphs, StepLimits
from attn_schema import StructuredOutput
from pretend_cuda import PretendCuda, to_pretended
from serving import assert_empty, make_engine, run_all, some_requests
from small_models import LETTERS, InPlace, SmallModel, small_model

OPTIONS = [
    {},
    {"repetition_penalty": 1.4},
    {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.4, "top_p": 0.9},
    {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"temperature": 0.7, "seed": 1, "frequency_penalty": 0.6, "top_k": 9},
    {"logit_bias": {5: 4.0, 9: -3.0}, "top_logprobs": 4},
    {"temperature": 1.1, "seed": 5, "min_p": 0.05, "top_logprobs": 0},
    {"temperature": 1.1, "seed": 6, "typical_p": 0.8},
    {"min_new_tokens": 6, "ignore_eos": False, "logit_bias": {63: 20.0}},
    {"temperature": 0.8, "seed": 2, "n": 3, "presence_penalty": 0.5},
    {"num_beams": 3, "repetition_penalty": 1.2},
    {"num_speculative_tokens": 3, "frequency_penalty": 0.2, "top_logprobs": 1},
]


@pytest.fixture
def gpu(monkeypatch) -> Iterator[PretendCuda]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
    with PretendCuda() as counter:
        yield counter


def requests_of(model, *, grammar: bool) -> list[Request]:
    found = []
    for number, options in enumerate(OPTIONS):
        (plain,) = some_requests(model, 1, seed=number)
        params = plain.params.replace(**options)
        suppressed = {"suppress_tokens": frozenset({1, 2})} if number % 4 == 1 else {}
        first = {"begin_suppress_tokens": frozenset({7, 63})} if number % 3 == 1 else {}
        found.append(Request(id=str(number), token_ids=plain.token_ids, params=params, **suppressed, **first))
    if grammar:
        params = SamplingParams(max_new_tokens=9, structured_output=StructuredOutput(regex="[a-e]{3,7}"))
        found.append(Request(id="grammar", token_ids=(4, 5), params=params))
    return found


def there(tokens: int = 1024) -> Engine:
    """An engine on the pretended GPU, of so many tokens of KV cache."""
    model = small_model("paged")
    to_pretended(model)
    size = StoreSize(tokens=tokens, requests=16, dtype="float64", device="cuda")
    store = installed().caches.get("paged").create(model.state_specs(), size)
    return Engine(model, store, LETTERS, EngineConfig(max_num_batched_tokens=40, enforce_eager=True))


def ahead_of_the_host() -> Engine:
    """An engine on the pretended GPU whose steps are launched ahead, over inputs in place."""
    model = in_place()
    to_pretended(model)
    size = StoreSize(tokens=1024, requests=16, dtype="float64", device="cuda")
    store = installed().caches.get("paged").create(model.state_specs(), size)
    config = EngineConfig(max_num_batched_tokens=40, enforce_eager=True, async_scheduling=True)
    engine = Engine(model, store, LETTERS, config)
    engine._runner.graphs = StepGraphs(model, store, Rerun(), StepLimits(0, 16))
    return engine


def in_place() -> SmallModel:
    torch.manual_seed(7)
    return SmallModel(InPlace(), InPlace(window=7)).double().eval()


def grammars() -> bool:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


def require_same(found, expected) -> None:
    """The outcomes of requests are the same, without errors: tokens, texts and log probabilities."""
    assert {key: outcome.error for key, outcome in found.items()} == dict.fromkeys(found)
    assert {key: outcome.ids for key, outcome in found.items()} == {key: one.ids for key, one in expected.items()}
    for key, outcome in found.items():
        assert outcome.text == expected[key].text
        for one, other in zip(outcome.tokens, expected[key].tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [top.id for top in one.top_logprobs or ()] == [top.id for top in other.top_logprobs or ()]


@pytest.mark.parametrize("every", [0, 2], ids=["all at once", "joining one by one"])
@pytest.mark.parametrize("tokens", [1024, 160], ids=["with room", "with preemptions"])
def test_every_option_of_sampling_gives_the_tokens_of_a_cpu(gpu, every, tokens):
    model = small_model("paged")
    requests = requests_of(model, grammar=grammars())
    expected = run_all(make_engine(model, "paged", requests=16), requests)
    engine = there(tokens)
    found = run_all(engine, requests, every=every)
    require_same(found, expected)
    assert (engine.stats().preemptions > 0) == (tokens == 160)
    assert_empty(engine)


@pytest.mark.parametrize("candidates", [1024, 4], ids=["candidates suffice", "candidates fall short"])
@pytest.mark.parametrize("every", [0, 2], ids=["all at once", "joining one by one"])
def test_every_option_gives_the_tokens_of_a_cpu_in_steps_that_are_launched_ahead(gpu, monkeypatch, every, candidates):
    monkeypatch.setattr(batch_sampler, "CANDIDATES", candidates)
    model = in_place()
    # Beams and drafts have every step wait.
    requests = [
        one
        for one in requests_of(model, grammar=False)
        if one.params.num_beams == 1 and one.id != str(len(OPTIONS) - 1)
    ]
    expected = run_all(make_engine(model, "paged", requests=16), requests)
    engine = ahead_of_the_host()
    found = run_all(engine, requests, every=every)
    require_same(found, expected)
    assert engine._async.launched_ahead > 5
    assert_empty(engine)
