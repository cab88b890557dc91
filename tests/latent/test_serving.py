"""A decoder whose layers remember latents, served from every cache, says what plain repeated computation says."""

import random

import pytest
import torch
from attn_engine import EngineConfig, FinishReason, Request, SamplingParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig

VOCABULARY = 31
PLAIN = {"vocab_size": VOCABULARY, "max_seq_len": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "norm": "rms"}
CHOICES = {
    "mla": {"mechanism": "mla", "options": {"latent": 6, "rotary_size": 4}, "positions": "none"},
    "mla with the model's rotary positions": {
        "mechanism": "mla",
        "options": {"latent": 6, "rotary_size": 4, "query_latent": 5},
        "positions": "rotary",
        "rope_interleave": True,
    },
    "transmla": {"mechanism": "transmla", "options": {"latent": 6}, "positions": "learned"},
    "transmla with rotary positions": {"mechanism": "transmla", "options": {"latent": 6}, "positions": "rotary"},
}


def greedy(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
@pytest.mark.parametrize("choice", CHOICES)
def test_requests_in_a_crowd_give_the_tokens_of_the_whole_sequence_run_again(choice, cache):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_plain(PLAIN | CHOICES[choice])).double().eval()
    rng = random.Random(1)
    prompts = {f"r{i}": [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))] for i in range(5)}
    engine = build_engine(model, config=EngineConfig(kv_cache=cache, max_num_seqs=3, max_num_batched_tokens=7))
    for name, prompt in prompts.items():
        engine.submit(
            Request(
                id=name,
                token_ids=tuple(prompt),
                params=SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True),
            )
        )
    said, ended = {name: [] for name in prompts}, {}
    while not engine.idle:
        for event in engine.step():
            said[event.request_id] += [token.id for token in event.delta.tokens]
            if event.ended:
                ended[event.request_id] = event.delta.finish_reason
    assert said == {name: greedy(model, prompt, 8) for name, prompt in prompts.items()}
    assert set(ended.values()) == {FinishReason.LENGTH}
