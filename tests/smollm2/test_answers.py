"""A real model, fetched and converted, answers."""

from __future__ import annotations

import pytest
from attn_engine import EngineConfig, Request, SamplingParams, build_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_it_knows_the_capital_of_france(smollm2):
    engine = build_engine(smollm2.model, smollm2.tokenizer, EngineConfig(max_num_seqs=1), kv_cache_tokens=128)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.encode_chat(question)
    engine.submit(Request(id="france", token_ids=prompt, params=SamplingParams(max_new_tokens=40)))
    news = []
    while not engine.idle:
        news += engine.step()
    assert "Paris" in "".join(event.delta.text for event in news)
    assert news[-1].ended
    assert news[-1].delta.finish_reason == "end_of_sequence"
