"""Models that read a source, in the batches of the engine: a crowd changes nothing, no source is left behind."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from attn_cache.encoder_states import EncoderStates
from attn_core import Source, installed
from attn_core.errors import Unavailable
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams

SIZES = {"vocab_size": 32, "max_seq_len": 80, "max_encoder_len": 12, "hidden_size": 16}
MODELS = {
    "bottleneck": {"embedding": 8, "num_layers": 2},
    "rnnsearch": {"embedding": 8, "maxout": 8},
    "luong": {"embedding": 8, "mechanism": "local_p", "options": {"radius": 3}},
    "transformer": {"num_layers": 2, "num_heads": 2, "intermediate_size": 24},
    "rnnsearch-coverage": {"embedding": 8, "maxout": 8, "mechanism": "coverage", "num_heads": 2},
    "transformer-coverage": {"num_layers": 1, "num_heads": 4, "intermediate_size": 24, "cross": "coverage"},
}
"""Options by family and, behind a dash, what is special: `coverage` remembers more than the source."""
CACHES = ["contiguous", "shared"]
EVERY = pytest.mark.parametrize("name", MODELS)
EVERYWHERE = pytest.mark.parametrize("cache_name", CACHES)


@cache
def model(name):
    torch.manual_seed(3)
    family = installed().models.get(name.partition("-")[0])
    built = family.build(family.configure(SIZES | MODELS[name])).double().eval()
    for parameter in built.parameters():  # large weights, so that every source has its own greedy answer
        torch.nn.init.normal_(parameter, std=0.6)
    return built


def engine(name, cache_name="contiguous", *, tokens=80 * 16, requests=16, max_num_batched_tokens=512):
    size = StoreSize(tokens=tokens, requests=requests, dtype="float64")
    store = installed().caches.get(cache_name).create(model(name).state_specs(), size)
    return Engine(model(name), store, config=EngineConfig(max_num_batched_tokens=max_num_batched_tokens))


def asked(count=16):
    generator = torch.Generator().manual_seed(1)

    def ids(length):
        return tuple(torch.randint(32, (length,), generator=generator).tolist())

    stem, sources = ids(36), [ids(length) for length in (1, 5, 9, 12)]
    return [
        Request(
            id=f"r{i}",
            token_ids=stem[: (1, 18, 36)[i % 3]] + ids(i % 5),
            encoder_token_ids=sources[i % 4],
            params=SamplingParams(max_new_tokens=3 + i % 6, ignore_eos=True),
        )
        for i in range(count)
    ]


def serve(running, requests, *, every=0, aborted=None):
    """Tokens by request; `aborted` maps steps to the requests that are cancelled before them."""
    made, waiting, step = {request.id: [] for request in requests}, list(requests), 0
    while waiting or not running.idle:
        while waiting and (every == 0 or step % every == 0):
            running.submit(waiting.pop(0))
            if every:
                break
        for id_ in (aborted or {}).get(step, ()):
            running.cancel(id_)
        for event in running.step():
            made[event.request_id] += [token.id for token in event.delta.tokens]
            if event.ended:
                assert event.delta.finish_reason or isinstance(event.error, Unavailable), event.error
        step += 1
    return made


@cache
def alone(name):
    return {request.id: tuple(serve(engine(name), [request])[request.id]) for request in asked()}


def assert_equal_alone(name, made, cut=()):
    for id_, tokens in made.items():
        expected = alone(name)[id_]
        assert tuple(tokens) == (expected[: len(tokens)] if id_ in cut else expected), id_


def assert_nothing_is_left(running):
    usage = running._store.usage()
    assert (usage.tokens, usage.requests) == (0, 0)
    held = running._store._encoder
    assert isinstance(held, EncoderStates)
    assert not held._requests
    assert not held._last


@EVERY
def test_the_answers_depend_on_the_source(name):
    one, other = (
        Request(
            id=str(source),
            token_ids=(1,),
            encoder_token_ids=source,
            params=SamplingParams(max_new_tokens=8, ignore_eos=True),
        )
        for source in ((1, 2, 3), (4, 5, 6))
    )
    made = serve(engine(name), [one, other])
    assert made[one.id] != made[other.id]


@EVERY
def test_alone_is_the_greedy_choice_of_the_whole_sequences(name):
    for request in asked(2):
        tokens = list(request.token_ids)
        for _ in range(request.params.max_new_tokens):
            logits = model(name)(torch.tensor([tokens]), torch.tensor([request.encoder_token_ids]))
            tokens.append(int(logits[0, -1].argmax()))
        assert tuple(tokens[len(request.token_ids) :]) == alone(name)[request.id]


@EVERY
@EVERYWHERE
def test_sixteen_staggered_requests_in_chunks_give_the_tokens_of_each_alone(name, cache_name):
    running = engine(name, cache_name, max_num_batched_tokens=11)
    assert_equal_alone(name, serve(running, asked(), every=2))
    if cache_name == "shared":
        assert running.stats().cached_tokens > 0
    assert_nothing_is_left(running)


@EVERY
def test_aborts_and_few_places_change_nothing_for_the_others(name):
    running = engine(name, "shared", requests=5, max_num_batched_tokens=23)
    made = serve(running, asked(), aborted={1: ("r2", "r9"), 4: ("r0",), 6: ("r11", "r5")})
    assert_equal_alone(name, made, cut={"r2", "r9", "r0", "r11", "r5"})
    assert_nothing_is_left(running)


@pytest.mark.parametrize("cache_name", ["paged", "shared"])
def test_preempted_requests_read_their_source_again(cache_name):
    running = engine("transformer", cache_name, tokens=96)
    requests = [
        Request(
            id=f"p{i}",
            token_ids=(i, 1),
            encoder_token_ids=(i + 1, 2),
            params=SamplingParams(max_new_tokens=36, ignore_eos=True),
        )
        for i in range(4)
    ]
    made = serve(running, requests)
    assert running.stats().preemptions > 0
    assert made == {request.id: serve(engine("transformer"), [request])[request.id] for request in requests}
    assert_nothing_is_left(running)


@EVERY
def test_nothing_is_shared_between_sources(name):
    running = engine(name, "shared")
    stem = tuple(range(32)) + tuple(range(8))
    for number, source in enumerate(((1, 2, 3), (3, 2, 1), (1, 2, 3))):
        request = Request(
            id=f"q{number}", token_ids=stem, encoder_token_ids=source, params=SamplingParams(max_new_tokens=6)
        )
        fresh = serve(engine(name), [request])[request.id]
        before = running.stats().cached_tokens
        assert serve(running, [request])[request.id] == fresh
        assert (running.stats().cached_tokens > before) == (number == 2)


@EVERY
def test_a_source_that_cannot_be_encoded_fails_alone(name, monkeypatch):
    encode = model(name).encode

    def fails(source):
        if len(source) == 5:
            raise RuntimeError("no memory for this one")
        return encode(source)

    monkeypatch.setattr(model(name), "encode", fails)
    running, requests = engine(name), asked(4)
    for request in requests:
        running.submit(request)
    outcome, made = {}, {request.id: [] for request in requests}
    while not running.idle:
        for event in running.step():
            made[event.request_id] += [token.id for token in event.delta.tokens]
            outcome[event.request_id] = event.error
    assert [outcome[f"r{i}"] is not None for i in range(4)].count(True) == 1
    assert outcome["r1"] is not None
    assert_equal_alone(name, {id_: tokens for id_, tokens in made.items() if id_ != "r1"})
    assert_nothing_is_left(running)


def test_the_bytes_of_a_request_are_its_formula():
    store = engine("rnnsearch")._store
    store.admit(7)
    with torch.no_grad():
        store.write_source(7, model("rnnsearch").encode(torch.tensor([1, 2, 3, 4])))
    states = [spec for specs in model("rnnsearch").state_specs().values() for spec in specs.values()]
    assert any(isinstance(spec, Source) and spec.rows == 1 for spec in states)
    assert store.live_bytes(7, 9) == sum(spec.bytes(9, 4, "float64") for spec in states)
