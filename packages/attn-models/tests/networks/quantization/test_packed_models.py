"""A model whose weights are packed for serving says what it said before, as far as its format lets it."""

from __future__ import annotations

import math

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue, KernelRefused, WrongState
from attn_core.kernels.linear import QUANTIZATIONS, WEIGHT_FORMATS
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.quantization.quantize import quantize_model

LLAMA = {
    "mechanism": "gqa",
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "norm": "rms",
    "feed_forward": "swiglu",
    "positions": "rotary",
    "vocab_size": 48,
}
GPT = {
    "mechanism": "mha",
    "num_heads": 4,
    "hidden_size": 64,
    "bias": True,
    "tie_word_embeddings": False,
    "vocab_size": 48,
}
OF_FLOATS = [kernel.name for kernel in installed().linears if kernel.weights in WEIGHT_FORMATS]
"""Kernels to which weights come as floats."""
ROUNDING = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 5e-2, "int4": 0.3}
"""How far logits may be off in the mean, as a share of their size, by the formats of a CPU; int4 keeps about 16
levels."""


def built(tiny, fields):
    torch.manual_seed(3)
    return Decoder(tiny(**fields)).eval()


def off(packed, plain, tokens):
    with torch.no_grad():
        expected = plain(tokens)
        return ((packed(tokens) - expected).norm() / expected.norm()).item()


def by_name(kernel):
    found = installed().linears.get(kernel)
    if reason := found.available():
        pytest.skip(f"{kernel}: {reason}")
    return found


@pytest.mark.parametrize("fields", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("weights", ROUNDING)
def test_packed_weights_round_and_do_nothing_else(weights, fields, tiny):
    model, plain = built(tiny, fields), built(tiny, fields)
    quantize_model(model, weights)
    tokens = torch.randint(48, (2, 16))
    assert off(model, plain, tokens) < ROUNDING[weights]


ARRANGED = {
    "norms on both sides": {"norm_place": "both"},
    "norms after": {"norm_place": "after"},
    "parallel": {"norm_place": "parallel"},
    "parallel, one norm": {"norm_place": "parallel_shared"},
    "a gated GELU": {"feed_forward": "geglu"},
    "a clamped gate": {"feed_forward": "swiglu_clamped", "bias": True},
    "multipliers": {"residual_multiplier": 0.3, "embedding_multiplier": 4.0, "logit_scale": 0.25},
    "no output bias": {"attention_bias": True, "attention_output_bias": False},
    "a biased unembedding": {"tie_word_embeddings": False, "unembedding_bias": True},
    "normed values": {"mechanism": "gemma", "options": {"norm_values": True}},
    "norms over all heads": {"mechanism": "gemma", "options": {"norm_over": "all_heads"}},
    "sinks in a window": {"mechanism": "sink", "options": {"window": 5}},
}


@pytest.mark.parametrize("fields", ARRANGED.values(), ids=ARRANGED)
def test_steps_of_packed_blocks_of_every_arrangement_give_what_the_plain_model_gives(fields, tiny, stepwise):
    model, plain = built(tiny, LLAMA | fields), built(tiny, LLAMA | fields)
    with torch.no_grad():
        for parameters in zip(model.parameters(), plain.parameters(), strict=True):
            drawn = 0.1 * torch.randn_like(parameters[0])
            for parameter in parameters:
                parameter.add_(drawn)
    quantize_model(model, "float32")
    prompt = torch.randint(48, (9,))
    with torch.no_grad():
        expected = plain(prompt[None])[0]
    (stepped,) = stepwise(model, [prompt.tolist()], [[5, 1, 1, 1, 1]])
    torch.testing.assert_close(stepped, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", OF_FLOATS)
def test_every_linear_kernel_serves_a_whole_model(kernel, tiny):
    found = by_name(kernel)
    model, plain = built(tiny, LLAMA), built(tiny, LLAMA)
    quantize_model(model, found.weights, kernel=kernel)
    tokens = torch.randint(48, (1, 16))
    assert off(model, plain, tokens) < ROUNDING[found.weights]


@pytest.mark.parametrize("kernel", OF_FLOATS)
def test_a_row_is_multiplied_alone_as_beside_others(kernel):
    found = by_name(kernel)
    torch.manual_seed(5)
    layer = found.pack(torch.randn(80, 64), torch.randn(80))
    rows = torch.randn(33, 64)
    rows[7] *= 1000  # a large neighbour must not coarsen the others' steps
    together = layer(rows)
    for row in (0, 6, 32):
        alone = layer(rows[row : row + 1])[0]
        if found.exact:
            assert torch.equal(alone, together[row])
        else:
            torch.testing.assert_close(alone, together[row], rtol=0, atol=2e-2 * alone.abs().max().item())


@pytest.mark.parametrize("kernel", OF_FLOATS)
def test_what_is_no_number_stays_none_and_stays_in_its_row(kernel):
    layer = by_name(kernel).pack(torch.randn(64, 64), None)
    rows = torch.randn(5, 64)
    rows[1, 3], rows[3, 40] = math.nan, math.inf
    out = layer(rows)

    assert out[1].isnan().any()
    assert not out[3].isfinite().all()
    assert out[[0, 2, 4]].isfinite().all()


def test_the_fewer_bits_the_further_off(tiny):
    plain = built(tiny, LLAMA)
    tokens = torch.randint(48, (2, 16))
    errors = []
    for weights in ROUNDING:
        model = built(tiny, LLAMA)
        quantize_model(model, weights)
        errors.append(off(model, plain, tokens))
    assert errors == sorted(errors)


def test_embeddings_keep_their_type_and_memory(tiny, tmp_path):
    save_model(tmp_path / "model", built(tiny, LLAMA).to(torch.bfloat16))
    model = load_model(tmp_path / "model", "float32", quantization="int8").model
    assert model.embedding.table.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model(torch.zeros(1, 2, dtype=torch.int64)).dtype == torch.float32


def test_a_loaded_model_counts_its_parameters_packed_or_not(tiny, tmp_path):
    save_model(tmp_path / "model", built(tiny, GPT))
    assert load_model(tmp_path / "model").parameters == load_model(tmp_path / "model", quantization="int4").parameters


def test_attention_maps_can_be_read_off_a_packed_model(tiny):
    model, plain = built(tiny, LLAMA), built(tiny, LLAMA)
    quantize_model(model, "float32")
    tokens = torch.randint(48, (9,))
    with torch.no_grad():
        for layer, weights in plain.attention_maps(tokens, [0, 1]).items():
            torch.testing.assert_close(model.attention_maps(tokens, [layer])[layer], weights, rtol=0, atol=1e-5)


def test_a_format_that_does_not_exist_is_refused_with_those_that_do(tiny):
    with pytest.raises(InvalidValue, match=r"int3.*float32, bfloat16, int8, int4"):
        quantize_model(built(tiny, LLAMA), "int3")


def test_fp8_is_refused_on_a_cpu_before_a_model_is_read_with_what_is_allowed_there(tmp_path):
    allowed = "auto, none, float32, bfloat16, int8, int4 on cpu; fp8 is supported on cuda only"
    with pytest.raises(InvalidValue, match=f"quantization: 'fp8' is not allowed; allowed: {allowed}"):
        load_model(tmp_path / "nothing is here", quantization="fp8")
    with pytest.raises(InvalidValue, match=allowed):
        load_sentence_encoder(tmp_path / "nothing is here", quantization="fp8")
    with pytest.raises(InvalidValue, match=", ".join(QUANTIZATIONS)):
        load_model(tmp_path / "nothing is here", quantization="fp7")


def test_a_format_without_a_kernel_for_the_device_is_refused_by_the_kernels_that_there_are(tiny):
    with pytest.raises(KernelRefused, match=r"as fp8: triton_fp8_w8a16 \(.*triton_fp8_w8a8 \("):
        quantize_model(built(tiny, LLAMA), "fp8")


def test_inputs_that_are_no_whole_groups_are_refused_with_every_reason(tiny):
    with pytest.raises(KernelRefused, match=r"torch_int4.*inputs: 40 is not a multiple of 32"):
        quantize_model(built(tiny, GPT | {"hidden_size": 40}), "int4")


def test_packed_weights_are_neither_packed_again_nor_saved(tiny, tmp_path):
    model = built(tiny, LLAMA)
    quantize_model(model, "int8")
    with pytest.raises(WrongState, match="packed already, as int8"):
        quantize_model(model, "int4")
    with pytest.raises(WrongState, match="int8"):
        save_model(tmp_path / "model", model)
    assert not (tmp_path / "model").exists()


def test_the_unembedding_of_four_bits_keeps_eight(tiny):
    plain, four, eight = built(tiny, LLAMA), built(tiny, LLAMA), built(tiny, LLAMA)
    quantize_model(four, "int4")
    quantize_model(eight, "int8")
    hidden = torch.randn(5, 64)
    with torch.no_grad():
        assert torch.equal(four.logits(hidden), eight.logits(hidden))
        assert not torch.equal(four.logits(hidden), plain.logits(hidden))
