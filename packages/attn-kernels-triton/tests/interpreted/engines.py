"""Engines of two-layer models in Triton's interpreter, and what the definition says of their tokens."""

from __future__ import annotations

import copy

import torch
from attn_core import Capability, installed
from attn_engine import Engine, EngineConfig, Request, SamplingParams
from attn_engine.build import build_engine
from attn_engine.graphs import Rerun, StepGraphs, StepLimits
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig

PROMPTS = ((3, 1, 4, 1, 5), tuple(range(2, 19)))
NEW, VOCABULARY, TOP = 3, 40, 5
OPTIONS = {
    "sliding_window": {"window": 6},
    "t5_bias": {"buckets": 8, "max_distance": 20},
    "mla": {"latent": 32, "rotary_size": 16, "nope_size": 16, "value_size": 16},
}
UNTURNED = {"mla", "t5_bias", "retnet"}
"""Those whose rotations are an option of their own, and one that is computed without."""


def model_of(name: str) -> Decoder:
    """A model of two layers, with weights large enough for its predictions to differ."""
    torch.manual_seed(0)
    turned = installed().mechanisms.get(name).can(Capability.ROTARY) and name not in UNTURNED
    groups = {"gqa": 2, "mqa": 1}.get(name)
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        max_seq_len=64,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=groups,
        norm="rms",
        feed_forward="swiglu",
        positions="rotary" if turned else "none",
        bias=False,
        mechanism=name,
        options=OPTIONS.get(name, {}),
    )
    model = Decoder(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model


def generated(model: Decoder, cache: str) -> tuple[list, StepGraphs]:
    """For each prompt the tokens with their log probabilities, and what the decode steps were recorded by."""
    engine = build_engine(model, None, EngineConfig(kv_cache=cache, max_num_seqs=4), kv_cache_tokens=512)
    graphs = engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(0, 4))
    return answered(engine), graphs


def generated_in_chunks(model: Decoder, cache: str, tokens: int) -> tuple[list, StepGraphs]:
    """The same of prompts in chunks of up to so many tokens, and what steps with these were recorded by."""
    config = EngineConfig(kv_cache=cache, max_num_seqs=4, max_num_batched_tokens=tokens)
    engine = build_engine(model, None, config, kv_cache_tokens=512)
    graphs = engine._runner.graphs = StepGraphs(model, engine._store, Rerun(), StepLimits(tokens, 4))
    return answered(engine), graphs


def answered(engine: Engine) -> list:
    """For each prompt the tokens with their log probabilities."""
    params = SamplingParams(max_new_tokens=NEW, temperature=0, top_logprobs=TOP)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Request(id=str(number), token_ids=prompt, params=params))
    found: dict[str, list] = {str(number): [] for number in range(len(PROMPTS))}
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.delta.tokens
    return list(found.values())


def require_defined(model: Decoder, found: list) -> None:
    """Fail unless each token is the most likely by the definition in float64, with its log probabilities."""
    exact = copy.deepcopy(model).double()
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = [token.id for token in tokens]
        assert len(ids) == NEW
        with torch.no_grad():
            logits = exact(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :].log_softmax(-1)
        assert ids == logits.argmax(-1).tolist()
        for token, expected in zip(tokens, logits, strict=True):
            for other in token.top_logprobs:
                assert abs(other.logprob - float(expected[other.id])) < 1e-3
