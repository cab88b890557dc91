"""An engine of a two-layer model computes with these kernels, prefill and decode, what the definition says."""

from __future__ import annotations

import copy

import pytest
import torch
from attn_core.kernels import rowwise
from attn_engine import EngineConfig, Request, SamplingParams
from attn_engine.build import build_engine
from attn_engine.decode_graphs import DecodeGraphs, Rerun
from attn_kernels_triton.launch import Launch
from attn_models.decoder.config import DecoderConfig
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import join_projections

PROMPTS = ((3, 1, 4, 1, 5), tuple(range(2, 19)))
NEW, VOCABULARY, TOP = 3, 40, 5
OPTIONS = {
    "sliding_window": {"window": 6},
    "t5_bias": {"buckets": 8, "max_distance": 20},
    "mla": {"latent": 32, "rotary_size": 16, "nope_size": 16, "value_size": 16},
}
STATIC = ["gqa", "mqa", "sliding_window", "t5_bias", "sink", "qk_norm", "soft_cap", "mla"]
EAGER = {"retnet": "state of fixed size", "gla": "state of fixed size", "gated_deltanet": "state of fixed size"}


def model_of(name: str) -> Decoder:
    """A model of two layers, with weights large enough for its predictions to differ."""
    torch.manual_seed(0)
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
        positions="none" if name in {"mla", "t5_bias", *EAGER} else "rotary",
        bias=False,
        mechanism=name,
        options=OPTIONS.get(name, {}),
    )
    model = Decoder(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model


def generated(model: Decoder, cache: str) -> tuple[list, DecodeGraphs]:
    """For each prompt the tokens with their log probabilities, and what the decode steps were recorded by."""
    engine = build_engine(model, None, EngineConfig(kv_cache=cache, max_num_seqs=4), kv_cache_tokens=512)
    graphs = engine._runner.graphs = DecodeGraphs(model, engine._store, Rerun(), 4)
    params = SamplingParams(max_new_tokens=NEW, temperature=0, top_logprobs=TOP)
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Request(id=str(number), token_ids=prompt, params=params))
    found: dict[str, list] = {str(number): [] for number in range(len(PROMPTS))}
    while not engine.idle:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.delta.tokens
    return list(found.values()), graphs


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


@pytest.fixture(autouse=True)
def few_processors(monkeypatch):
    """An interpreter's time goes by programs, and there are as many as processors are to be kept busy."""
    monkeypatch.setattr("attn_kernels_triton.paged.bucket.processors", lambda _: 6)


@pytest.fixture
def programs(monkeypatch):
    """The names of the programs that were started."""
    seen: list[str] = []
    run = Launch.run

    def recorded(self, device):
        seen.append(self.program.__name__)
        run(self, device)

    monkeypatch.setattr(Launch, "run", recorded)
    return seen


@pytest.mark.parametrize("name", STATIC)
def test_recorded_decode_steps_say_what_the_definition_says(name, programs):
    model = model_of(name)
    found, graphs = generated(model, "shared")
    assert (graphs.reason, graphs.replayed) == (None, NEW - 1)
    assert "lay_out" in programs
    assert ("rotate_append" in programs) == (model.config.positions == "rotary")
    assert rowwise.row_kernel(rowwise.NormKernel, "plain", torch.zeros(2, 64)) is not None
    require_defined(model, found)


def test_prompts_that_begin_together_take_one_program_a_layer(programs):
    model = model_of("gqa")
    found, _ = generated(model, "shared")
    whole = [name for name in programs if name.startswith("attend") and name != "attend_paged"]
    assert len(whole) == len(model.blocks)
    require_defined(model, found)


@pytest.mark.parametrize("name", ["gqa", "qk_norm"])
def test_projections_that_were_joined_say_the_same(name):
    model = model_of(name)
    before, _ = generated(model, "shared")
    joined = copy.deepcopy(model)
    join_projections(joined)
    after, graphs = generated(joined, "shared")
    assert graphs.reason is None
    assert [[token.id for token in tokens] for tokens in after] == [[token.id for token in tokens] for tokens in before]


@pytest.mark.parametrize("name", EAGER)
def test_mechanisms_without_a_static_step_run_as_ever_and_say_why(name):
    model = model_of(name)
    found, graphs = generated(model, "shared")
    assert graphs.replayed == 0
    assert EAGER[name] in graphs.reason
    require_defined(model, found)
