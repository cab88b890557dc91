"""Tokens drawn by the kernel are those of the definition in NumPy, bit for bit, on every chip and in every crowd."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.sampling import TokenCounts, sampling_kernel
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_engine.sampler import SamplingRow, choose_tokens, log_probabilities
from attn_kernels_cpu import library
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig
from attn_schema.sampling import ResolvedSamplingParams as Params
from sampling_definition import defined_tokens

PARAMS = [
    Params(temperature=0, logit_bias={1: 50.0, 2: 40.0}),
    Params(temperature=0, repetition_penalty=1.3),
    Params(temperature=1.0),
    Params(temperature=1e-30),
    Params(temperature=0.6, min_p=0.03),
    Params(temperature=0.8, top_k=40),
    Params(temperature=0.8, top_k=1),
    Params(temperature=1.0, top_p=0.9),
    Params(temperature=2.0, top_p=0.999),
    Params(temperature=1.5, top_k=900, top_p=0.97, min_p=0.001),
    Params(temperature=0.7, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=0.3, top_p=0.9),
]


def rows_of(size, seed):
    """A row for each of the parameters, some with constraints; and their logits, with ties."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, params in enumerate(PARAMS):
        prompt, generated = torch.randint(0, size + 2, (2, size), generator=generator).tolist()
        penalised = params.repetition_penalty != 1
        allowed = torch.rand(size, generator=generator) < 0.7 if number % 3 == 2 and size > 3 else None
        occurred = TokenCounts(prompt, generated) if penalised else None
        rows.append(SamplingRow(params, seed + number, 7 * number, occurred, allowed))
    spread = (0.2, 1.0, 4.0)[seed % 3]
    logits = spread * torch.randn(len(rows), size, generator=generator)
    return (logits.bfloat16().float() if seed % 2 else logits), rows


def kernel(size):
    library.library()
    found = sampling_kernel(size, "cpu")
    assert found is not None
    assert found.name == "cpu_sampling"
    return found


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("size", [3, 300, 6001])
def test_the_kernel_draws_the_tokens_of_the_definition(size):
    for seed in range(9):
        logits, rows = rows_of(size, seed)
        assert choose_tokens(logits, rows, kernel(size)) == defined_tokens(logits, rows)


@pytest.mark.usefixtures("_kernels")
def test_a_row_has_the_bits_alone_that_it_has_in_a_crowd():
    logits, rows = rows_of(1000, 4)
    native = kernel(1000)
    together = choose_tokens(logits, rows, native)
    assert together == [choose_tokens(logits[i : i + 1], rows[i : i + 1], native)[0] for i in range(len(rows))]
    told = log_probabilities(logits, together, 7, native)
    assert told == [log_probabilities(logits[i : i + 1], together[i : i + 1], 7, native)[0] for i in range(len(rows))]


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("top", [0, 1, 20, 400])
def test_log_probabilities_are_those_of_float64(top):
    logits = 4 * torch.randn(5, 333, generator=torch.Generator().manual_seed(top))
    tokens = [0, 332, 7, 8, 9]
    expected = logits.double().log_softmax(-1)
    values, ids = expected.topk(min(top, 333))
    for row, (own, pairs) in enumerate(log_probabilities(logits, tokens, top, kernel(333))):
        assert own == pytest.approx(expected[row, tokens[row]].item(), abs=2e-6)
        assert [token for token, _ in pairs] == ids[row].tolist()
        assert [value for _, value in pairs] == pytest.approx(values[row].tolist(), abs=2e-6)


@pytest.mark.usefixtures("_best_kernels")
@pytest.mark.parametrize("params", PARAMS[2:], ids=range(len(PARAMS) - 2))
def test_rows_without_a_finite_number_get_no_token(params):
    logits = torch.zeros(4, 50)
    logits[1] = -torch.inf
    logits[2, 3] = torch.nan
    logits[3, 3] = torch.inf
    found = choose_tokens(logits, [SamplingRow(params, 1, 1) for _ in range(4)], kernel(50))
    assert found[0] >= 0
    assert found[1:] == [-1, -1, -1]


@pytest.mark.usefixtures("_best_kernels")
def test_a_bias_of_a_token_that_is_not_there_is_refused():
    rows = [SamplingRow(Params(temperature=1.0, logit_bias={50: 1.0}), 1, 1)]
    with pytest.raises(InvalidValue, match=r"logit_bias.*tokens from 0 to 49"):
        choose_tokens(torch.zeros(1, 50), rows, kernel(50))


@pytest.mark.usefixtures("_best_kernels")
def test_an_engine_of_packed_weights_draws_with_the_kernel_what_it_would_draw_without(monkeypatch):
    torch.manual_seed(3)
    sizes = {"vocab_size": 97, "max_seq_len": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
    model = Decoder(DecoderConfig.from_plain(sizes)).eval()
    quantize_model(model, "int8")

    def drawn():
        engine = build_engine(model, config=EngineConfig(max_num_seqs=8), kv_cache_tokens=512)
        for number, top_p in enumerate((1.0, 0.9, 0.8, 0.95)):
            params = SamplingParams(temperature=1.2, top_p=top_p, seed=number, max_new_tokens=12, top_logprobs=2)
            engine.submit(Request(id=str(number), token_ids=(5, 6, number), params=params))
        found = {}
        while not engine.idle:
            for event in engine.step():
                found.setdefault(event.request_id, []).extend(token.id for token in event.delta.tokens)
        return found

    asked = []
    native = kernel(97)
    choose = type(native).choose
    monkeypatch.setattr(type(native), "choose", lambda self, *given: asked.append(1) or choose(self, *given))
    first = drawn()
    assert asked
    monkeypatch.setattr(type(native), "available", lambda _self: "not now")
    assert drawn() == first
