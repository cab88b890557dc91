"""Layers that share keys and values, from training to a crowd of requests over pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attn_core import installed, state_bytes
from attn_core.stores import StoreSize
from attn_engine import Engine, EngineConfig, Request, SamplingParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from torch.nn import functional

VOCABULARY, CONTEXT = 32, 64
WINDOWS = [{"mechanism": "sliding_window", "options": {"window": 5}}] * 2 + ["mha"] * 2
FORMS: dict[str, dict[str, Any]] = {
    "cla": {"kv_sharing": "cla:2", "mechanism": "gqa", "num_kv_heads": 2},
    "yoco": {"kv_sharing": "yoco", "pattern": WINDOWS},
}
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def decoder(form: str) -> Decoder:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "max_seq_len": CONTEXT,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "positions": "rotary",
    }
    return Decoder(DecoderConfig.from_plain(sizes | FORMS[form]))


def tokens(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    made: dict[str, list[int]] = {request.id: [] for request in asked}
    waiting = list(asked)
    while waiting or not engine.idle:
        if waiting:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            made[event.request_id] += [token.id for token in event.delta.tokens]
            assert event.error is None, event.error
    return made


@EVERY_FORM
def test_a_request_in_a_crowd_gives_the_tokens_of_the_request_alone(form: str) -> None:
    model = decoder(form).double().eval()
    generator = torch.Generator().manual_seed(1)
    stem = torch.randint(VOCABULARY, (20,), generator=generator).tolist()
    asked = []
    for number in range(5):
        tail = torch.randint(VOCABULARY, (1 + 3 * number,), generator=generator).tolist()
        task = SamplingParams(max_new_tokens=5 + number % 3, ignore_eos=True)
        asked.append(Request(id=f"r{number}", token_ids=(*stem, *tail), params=task))
    alone = {request.id: tokens(build_engine(model), [request])[request.id] for request in asked}
    # So little room that some must wait and some are thrown out and computed again.
    assert (
        tokens(build_engine(model, config=EngineConfig(kv_cache="shared", max_num_seqs=3), kv_cache_tokens=96), asked)
        == alone
    )


@EVERY_FORM
@pytest.mark.parametrize("cache", ["contiguous", "paged", "shared"])
def test_what_is_shared_lies_in_the_store_once(form: str, cache: str) -> None:
    model = decoder(form)
    specs = model.state_specs()
    store = installed().caches.get(cache).create(specs, StoreSize(tokens=64, requests=1))
    assert store.admit(0)
    assert store.reserve(0, 20)
    rows = 20 * 2 * 2 * 8 * 2 if form == "cla" else (20 + 5 + 5) * 4 * 8 * 2
    assert sum(state_bytes(states, tokens=20, dtype="float32") for states in specs.values()) == 4 * rows
    assert store.live_bytes(0, 20) == 4 * rows


@EVERY_FORM
def test_it_learns(form: str) -> None:
    model = decoder(form).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    period = torch.arange(24) % 7
    losses = []
    for _ in range(40):
        logits = model(period[None, :-1])[0]
        loss = functional.cross_entropy(logits, period[1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
