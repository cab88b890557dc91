"""A real model, fetched and converted, answers."""

from __future__ import annotations

import pytest
from attn_engine import Request, Sampling, build_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_it_knows_the_capital_of_france(smollm2):
    engine = build_engine(smollm2.model, smollm2.tokenizer, requests=1, tokens=128)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.encode_chat(question)
    engine.submit(Request(id="france", token_ids=prompt, task=Sampling(max_new_tokens=40)))
    news = []
    while not engine.idle:
        news += engine.step()
    assert "Paris" in "".join(event.text for event in news)
    assert news[-1].finish is not None
    assert news[-1].finish.reason == "end_of_sequence"
