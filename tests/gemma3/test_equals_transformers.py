"""Gemma 3 through our engine gives what transformers gives on the same weights, alone and in a batch."""

from __future__ import annotations

import pytest
import torch
from attn_engine import EngineConfig, Request, SamplingParams, build_engine

NEW_TOKENS = 24
ROOM = 64  # tokens of the longest prompt and its continuation
WINDOW = 512
pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.timeout(1200)]


def generate(model, prompts, *, room=ROOM, **config):
    """The greedy continuations of the prompts."""
    config = EngineConfig(**config)
    engine = build_engine(model, config=config, kv_cache_tokens=room * config.batch_sizes[0])
    task = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(id=str(number), token_ids=prompt, params=task))
    made: list[list[int]] = [[] for _ in prompts]
    while not engine.idle:
        for event in engine.step():
            made[int(event.request_id)] += [token.id for token in event.delta.tokens]
    return made


def greedy(peer, prompt, guess):
    """What transformers generates greedily, given a guess: it is asked at every position of it, and again from where
    it would have gone on in another way."""
    made: list[int] = []
    while len(made) < NEW_TOKENS:
        sequence = torch.tensor([[*prompt, *made, *guess[len(made) :]]])
        with torch.inference_mode():
            likeliest = peer(sequence).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        agreed = next((i for i, (a, b) in enumerate(zip(likeliest, guess, strict=True)) if a != b), NEW_TOKENS)
        made = likeliest[: agreed + 1]
        guess = [*made, *guess[len(made) :]]
    return made


def test_logits_are_those_of_transformers(gemma3, peer, prompts):
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            torch.testing.assert_close(gemma3.model(tokens), peer(tokens).logits, rtol=1e-4, atol=1e-3)


def test_every_prompt_is_continued_as_by_transformers_in_a_batch_and_alone(gemma3, peer, prompts):
    batched = generate(gemma3.model, prompts, max_num_seqs=16)
    assert batched == [greedy(peer, prompt, guess) for prompt, guess in zip(prompts, batched, strict=True)]
    assert [generate(gemma3.model, [prompt], max_num_seqs=1)[0] for prompt in prompts[:4]] == batched[:4]


def test_beyond_the_window_nothing_changes_whole_or_in_chunks(gemma3, peer, long_prompt):
    assert len(long_prompt) > WINDOW
    (made,) = generate(gemma3.model, [long_prompt], max_num_seqs=1, room=1024, max_num_batched_tokens=100)
    assert made == greedy(peer, long_prompt, made)
