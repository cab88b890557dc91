"""Requests that say nothing of draft tokens get some where bits do not depend on them, and the same tokens."""

from __future__ import annotations

import pytest
import torch
from attn_core.models import BatchInvariant
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig

pytestmark = pytest.mark.usefixtures("_best_kernels")

SIZES = {"vocab_size": 61, "max_seq_len": 256, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "bias": False}
LLAMA = SIZES | {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "intermediate_size": 96}
PROMPT = (7, 3, 9, 4, 7, 3, 9, 4, 7, 3, 9, 4, 7, 3)


def model(fields=LLAMA, weights="int8"):
    torch.manual_seed(11)
    made = Decoder(DecoderConfig.from_plain(fields)).eval()
    if weights is not None:
        quantize_model(made, weights)
    return made


def run(of, count=1, cache="shared", tokens=None, **params):
    """The tokens of each request, and what the engine says of its drafts."""
    config = EngineConfig(kv_cache=cache, max_num_seqs=16, num_speculative_tokens=tokens)
    engine = build_engine(of, config=config, kv_cache_tokens=count * 192)
    for number in range(count):
        given = SamplingParams(max_new_tokens=80, ignore_eos=True, seed=number, **params)
        engine.submit(Request(id=str(number), token_ids=(*PROMPT, number), params=given))
    found, steps = {}, 0
    while not engine.idle:
        steps += 1
        for event in engine.step():
            assert event.error is None
            found.setdefault(event.request_id, []).extend(token.id for token in event.delta.tokens)
    return found, engine.stats(), steps


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_drafts_that_nobody_asked_for_change_no_token_and_save_steps(weights, temperature):
    packed = model(weights=weights)
    assert isinstance(packed, BatchInvariant)
    assert packed.batch_invariant
    plain, load, steps = run(packed, 3, tokens=0, temperature=temperature)
    assert load.draft_tokens == 0
    found, load, fewer = run(packed, 3, temperature=temperature)
    assert found == plain
    assert load.accepted_tokens > 0
    assert fewer < steps


def test_many_requests_together_get_none():
    packed = model()
    found, load, _ = run(packed, 9)
    alone, _, _ = run(packed, 9, tokens=0)
    assert found == alone
    assert load.draft_tokens == 0


@pytest.mark.parametrize(
    ("fields", "weights", "cache"),
    [(LLAMA, None, "shared"), (SIZES, "int8", "shared"), (LLAMA, "int8", "int8")],
    ids=["weights that are not packed", "blocks that no kernel computes", "a cache that rounds"],
)
def test_where_bits_may_depend_on_drafts_nobody_gets_what_was_not_asked_for(fields, weights, cache):
    assert run(model(fields, weights), cache=cache)[1].draft_tokens == 0


def test_nobody_gets_any_from_when_on_a_model_is_taken_apart():
    packed = model()
    engine = build_engine(packed, config=EngineConfig(max_num_seqs=2), kv_cache_tokens=192)
    packed.take_apart()
    engine.submit(Request(id="r", token_ids=PROMPT, params=SamplingParams(max_new_tokens=60, ignore_eos=True)))
    while not engine.idle:
        engine.step()
    assert engine.stats().draft_tokens == 0
