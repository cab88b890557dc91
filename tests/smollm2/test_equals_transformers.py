"""A real model through our engine gives what transformers gives on the same weights, in whatever company it runs."""

from __future__ import annotations

import math

import pytest
import torch
from attn_engine import EngineConfig, Request, SamplingParams, ScoringParams, build_engine

NEW_TOKENS = 64
ROOM = 160  # tokens of the longest prompt and its continuation
pytestmark = [pytest.mark.oracle, pytest.mark.slow, pytest.mark.timeout(1200)]


def generate(model, prompts, tokens=None, **config):
    """The greedy continuations of the prompts, and the engine that made them."""
    config = EngineConfig(**config)
    engine = build_engine(model, config=config, kv_cache_tokens=tokens or ROOM * config.batch_sizes[0])
    task = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(id=str(number), token_ids=prompt, params=task))
    made: list[list[int]] = [[] for _ in prompts]
    while not engine.idle:
        for event in engine.step():
            made[int(event.request_id)] += [token.id for token in event.delta.tokens]
    return made, engine


@pytest.fixture(scope="module")
def expected(smollm2, peer, prompts):
    """What transformers generates greedily.

    Found by asking it for the likeliest token at every position of our own continuation: where all agree, its greedy
    search makes the same tokens, by induction from the first. Where one differs, it goes on from its own.
    """
    ours, _ = generate(smollm2.model, prompts, max_num_seqs=16)
    return [greedy(peer, prompt, guess) for prompt, guess in zip(prompts, ours, strict=True)]


def greedy(peer, prompt, guess):
    made: list[int] = []
    while len(made) < NEW_TOKENS:
        sequence = torch.tensor([[*prompt, *made, *guess[len(made) :]]])
        with torch.inference_mode():
            likeliest = peer(sequence).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        agreed = next((i for i, (a, b) in enumerate(zip(likeliest, guess, strict=True)) if a != b), NEW_TOKENS)
        made = likeliest[: agreed + 1]
        guess = [*made, *guess[len(made) :]]
    return made


def test_logits_are_those_of_transformers(smollm2, peer, prompts):
    worst = 0.0
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            worst = max(worst, (smollm2.model(tokens) - peer(tokens).logits).abs().max().item())
    assert worst <= 1e-4


def test_alone_every_prompt_is_continued_as_by_transformers(smollm2, prompts, expected):
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert generate(smollm2.model, [prompt], max_num_seqs=1)[0] == [tokens]


def test_in_a_batch_of_sixteen_every_prompt_is_continued_as_by_transformers(smollm2, prompts, expected):
    assert generate(smollm2.model, prompts, max_num_seqs=16)[0] == expected


def test_with_prompts_computed_in_chunks_nothing_changes(smollm2, prompts, expected):
    made, _ = generate(smollm2.model, prompts, max_num_seqs=16, max_num_batched_tokens=23)
    assert made == expected


def test_after_preemption_nothing_changes(smollm2, prompts, expected):
    made, engine = generate(smollm2.model, prompts, max_num_seqs=16, kv_cache="paged", tokens=700)
    assert engine.stats().preemptions > 0
    assert made == expected


def test_attention_maps_are_those_of_transformers(smollm2, peer, prompts):
    layers = [0, 14, 29]
    maps = smollm2.model.attention_maps(torch.tensor(prompts[0]), layers)
    peer.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            theirs = peer(torch.tensor([prompts[0]]), output_attentions=True).attentions
    finally:
        peer.set_attn_implementation("sdpa")
    for layer in layers:
        torch.testing.assert_close(maps[layer], theirs[layer][0], rtol=0, atol=1e-5)


def test_a_text_has_the_perplexity_that_transformers_gives_it_to_four_digits(smollm2, peer, passage):
    engine = build_engine(
        smollm2.model, config=EngineConfig(max_num_seqs=1, max_num_batched_tokens=100), kv_cache_tokens=len(passage)
    )
    engine.submit(Request(id="text", token_ids=passage, params=ScoringParams()))
    said: list[float] = []
    while not engine.idle:
        for event in engine.step():
            said += [token.logprob for token in event.delta.tokens if token.logprob is not None]
    tokens = torch.tensor([passage])
    with torch.inference_mode():
        theirs = peer(tokens, labels=tokens).loss.exp().item()
    assert len(said) == len(passage) - 1
    assert math.exp(-sum(said) / len(said)) == pytest.approx(theirs, rel=5e-5)
