"""What a server packs unasked loses nothing, and is left out where no kernel can promise that."""

from __future__ import annotations

import logging

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.kernels.linear import LinearKernel
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model

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
TOKENS = torch.arange(48).view(2, 24)


def lossless(form):
    return [k for k in installed().linears if k.weights == form and k.exact and k.float32 and k.available() is None]


@pytest.fixture(params=["float32", "bfloat16"])
def folder(request, tiny, tmp_path):
    """A model stored in one type of floats."""
    if not lossless(request.param):
        pytest.skip(f"no kernel here multiplies {request.param} weights without loss")
    torch.manual_seed(3)
    model = Decoder(tiny(**LLAMA, final_logit_softcapping=3.0)).to(getattr(torch, request.param))
    return save_model(tmp_path / request.param, model)


def logits(folder, weights, dtype="float32"):
    loaded = load_model(folder, dtype, quantization=weights)
    with torch.no_grad():
        return loaded.model.quantization, loaded.model(TOKENS)


def test_weights_are_packed_as_they_are_stored_and_lose_nothing(folder):
    packed, found = logits(folder, "auto")
    assert packed == folder.name
    plain, expected = logits(folder, "none")
    assert plain is None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_packed_weights_are_as_near_to_float64_as_plain_float32_is(folder):
    """Rounding a weight or an input to bfloat16 would be a thousand times as far."""
    exact = logits(folder, "none", "float64")[1]
    plain, packed = (logits(folder, weights)[1] for weights in ("none", "auto"))
    assert (packed - exact).norm() < 2 * (plain - exact).norm()


def test_a_model_that_computes_in_another_type_is_left_as_it_is(folder):
    packed, found = logits(folder, "auto", "bfloat16")
    assert packed is None
    assert found.dtype == torch.bfloat16


class Rounding(LinearKernel):
    """Would round every input, as chips with bfloat16 do."""

    name, summary, weights, exact = "rounding", "rounds its inputs", "bfloat16", True

    def cost(self, problem):
        return 0.0

    def pack(self, weight, bias):
        raise AssertionError


class Absent(Rounding):
    """Could do it on another machine."""

    name, float32 = "absent", True

    def available(self):
        return "no C++ compiler is found"


@pytest.mark.parametrize(
    ("kernels", "why"), [([Rounding()], "attn-kernels-cpu is not installed"), ([Absent()], "absent: no C++ compiler")]
)
def test_without_such_a_kernel_the_model_runs_unpacked_and_a_warning_says_why(
    kernels, why, tiny, tmp_path, monkeypatch, caplog
):
    torch.manual_seed(3)
    save_model(tmp_path / "m", Decoder(tiny(**LLAMA)).to(torch.bfloat16))
    expected = logits(tmp_path / "m", None)[1]
    monkeypatch.setattr("attn_models.quantization.quantize.installed", lambda: type("C", (), {"linears": kernels}))
    with caplog.at_level(logging.WARNING):
        packed, found = logits(tmp_path / "m", "auto")
    assert packed is None
    assert torch.equal(found, expected)
    assert why in caplog.text


@pytest.mark.parametrize("weights", ["", "int7", "AUTO"])
def test_another_word_for_the_weights_is_refused_with_those_that_there_are(weights, tiny, tmp_path):
    save_model(tmp_path / "m", Decoder(tiny(**LLAMA)))
    with pytest.raises(InvalidValue, match=r"quantization.*auto, none, float32, bfloat16, int8, int4"):
        load_model(tmp_path / "m", quantization=weights)
