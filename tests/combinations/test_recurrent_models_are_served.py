"""Recurrent language models in the batches of the engine: a crowd changes nothing, and each kind of state is freed."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from attn_core import installed
from attn_engine import EngineConfig, Request, SamplingParams, build_engine

MODELS = {
    "key_value_lm": {"embedding": 8, "num_lstm_layers": 2, "options": {"window": 3}},
    "lstmn_lm": {"num_layers": 2},
    "turing_machine": {"num_heads": 2, "head_dim": 6, "options": {"slots": 7}},
}
SIZES = {"vocab_size": 32, "max_seq_len": 96, "hidden_size": 16}


@cache
def model(name):
    torch.manual_seed(3)
    family = installed().models.get(name)
    built = family.build(family.configure(SIZES | MODELS[name])).double().eval()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter)
    torch.nn.init.zeros_(built.unembedding.bias)  # or one token would always win
    return built


def requests():
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(32, (36,), generator=generator).tolist()
    task = SamplingParams(max_new_tokens=6, ignore_eos=True)
    return [Request(id=f"r{n}", token_ids=(*stem[: (1, 18, 36)[n % 3]], n, 3), params=task) for n in range(8)]


def served(engine, asked, every=0):
    made, waiting, steps = {request.id: [] for request in asked}, list(asked), 0
    while waiting or not engine.idle:
        if waiting and (every == 0 or steps % every == 0):
            engine.submit(waiting.pop(0))
        for event in engine.step():
            assert event.error is None, event.error
            made[event.request_id] += [token.id for token in event.delta.tokens]
        steps += 1
    return made


@pytest.mark.parametrize(("cache_name", "room"), [("contiguous", 192), ("shared", 112)])
@pytest.mark.parametrize("name", MODELS)
def test_a_crowd_gives_each_request_the_tokens_it_gets_alone(name, cache_name, room):
    alone = {request.id: served(build_engine(model(name)), [request])[request.id] for request in requests()}
    # So little room that some must wait and some are thrown out and computed again.
    engine = build_engine(model(name), config=EngineConfig(kv_cache=cache_name, max_num_seqs=4), kv_cache_tokens=room)
    assert served(engine, requests(), every=2) == alone
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_tokens_used) == (0, 0, 0)
    assert len({tuple(tokens) for tokens in alone.values()}) > 4, "the prompts do not matter"
