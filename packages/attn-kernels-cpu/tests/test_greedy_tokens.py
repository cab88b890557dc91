"""Models with packed weights find likeliest tokens without logits, and engines make of them what logits would have
made.
"""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.models import FindsLargest, GreedyHead
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig

pytestmark = pytest.mark.usefixtures("_best_kernels")

SIZES = {"vocab_size": 61, "max_seq_len": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
FORMATS = ["float32", "bfloat16", "int8", "int4"]


def packed(weights, **fields):
    torch.manual_seed(8)
    model = Decoder(DecoderConfig.from_plain(SIZES | fields)).eval()
    quantize_model(model, weights)
    return model


def completions(model):
    engine = build_engine(model, config=EngineConfig(kv_cache="paged", max_num_seqs=8), kv_cache_tokens=512)
    tasks = [
        SamplingParams(max_new_tokens=10),
        SamplingParams(max_new_tokens=10, temperature=0.7, seed=3),
        SamplingParams(max_new_tokens=10, num_speculative_tokens=2),
    ]
    for i in range(8):
        engine.submit(Request(id=str(i), token_ids=(1 + i, 2, 3, 2), params=tasks[i % 3]))
    found = {str(i): [] for i in range(8)}
    while not engine.idle:
        for event in engine.step():
            found[event.request_id] += [token.id for token in event.delta.tokens]
    return found


@pytest.mark.parametrize("weights", FORMATS)
def test_likeliest_tokens_are_those_of_the_logits(weights):
    model, hidden = packed(weights), torch.randn(20, 64)
    assert isinstance(model, GreedyHead)
    found = model.greedy_tokens(hidden)
    if weights == "bfloat16" and not isinstance(model.head, FindsLargest):
        # Some processors have oneDNN multiply bfloat16 fastest, which gives outputs and not where the largest is.
        assert found is None
    else:
        assert found.tolist() == model.logits(hidden).argmax(-1).tolist()


@pytest.mark.parametrize("weights", FORMATS)
def test_an_engine_gives_the_tokens_that_logits_give(weights):
    model = packed(weights)
    expected = packed(weights)
    expected.greedy_tokens = lambda hidden: None
    assert completions(model) == completions(expected)


def test_capped_logits_and_plain_weights_are_looked_at_themselves():
    """A cap makes logits equal that are not: their first is another."""
    assert packed("float32", final_logit_softcapping=1.0).greedy_tokens(torch.randn(2, 64)) is None
    assert Decoder(DecoderConfig.from_plain(SIZES)).greedy_tokens(torch.randn(2, 64)) is None


def test_a_packed_translator_finds_its_tokens_too():
    torch.manual_seed(2)
    family = installed().models.get("transformer")
    model = family.build(family.configure(SIZES | {"max_encoder_len": 32, "intermediate_size": 96})).eval()
    hidden = torch.randn(9, 64)
    assert model.greedy_tokens(hidden) is None
    quantize_model(model, "int8")
    assert model.greedy_tokens(hidden).tolist() == model.logits(hidden).argmax(-1).tolist()
