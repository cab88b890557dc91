"""Weights in fewer bits: read back as written, and wrong where the text needs them least."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_models.evaluation import text_loss
from attn_models.export.integers import gptq, rounded
from attn_models.export.k_quants import K_QUANTS, quantize_k
from attn_models.export.quantized import METHODS, quantize_folder
from attn_models.loading import load_model, save_model
from attn_models.tokenizers.learned import character_tokenizer
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file

TEXT = "".join(chr(97 + int(26 * math.sin(place * place) ** 2)) for place in range(600))
LLAMA = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "intermediate_size": 96}
GPT2 = {"norm": "layer", "feed_forward": "gelu_tanh", "positions": "learned", "bias": True}
SIZES = {"max_seq_len": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 4}


def made(folder, fields):
    """A folder of a small model some inputs of whose norms are large, and the model."""
    torch.manual_seed(0)
    tokenizer, family = character_tokenizer(TEXT), installed().models.get("decoder")
    model = family.build(family.configure({**SIZES, "vocab_size": tokenizer.vocab_size, **fields})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("norm.weight"):
                parameter[::16] *= 8
    return save_model(folder, model, tokenizer), model


@pytest.mark.parametrize("kind", K_QUANTS)
def test_errors_count_by_importance(kind):
    generator = np.random.default_rng(0)
    weights = generator.standard_normal((8, 512)).astype(np.float32)
    importance = generator.random(512).astype(np.float32) ** 4
    errors = [
        dequantize(quantize_k(weights, K_QUANTS[kind], each), GGMLQuantizationType[kind.upper()]) - weights
        for each in (None, importance, 0 * importance)
    ]
    plain, counted, unread = (float((importance * error**2).sum()) for error in errors)
    assert counted < 0.95 * plain
    assert unread == plain


def test_inputs_that_go_together_make_up_for_each_others_errors():
    torch.manual_seed(0)
    weight = torch.randn(24, 64)
    rows = torch.randn(500, 64) * torch.logspace(-2, 0, 64) @ torch.randn(64, 64)
    rows[:, 5] = 0
    product = rows.T @ rows

    def error(found):
        return ((found.weight() - weight) @ rows.double().T).norm()

    assert error(gptq(weight, product, 32)) < 0.8 * error(rounded(weight, 32))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_quantized_is_read_back_and_judged(method, tmp_path):
    folder, exact = made(tmp_path / "own", LLAMA)
    target = tmp_path / ("x" if method in ("gptq", "awq") else "x.gguf")
    done = quantize_folder(folder, target, method, TEXT)
    assert done.layout == "llama"
    again, ids = load_model(target), torch.tensor(character_tokenizer(TEXT).encode(TEXT))
    held = ids[-len(ids) // 5 :]
    for perplexity, model in ((done.perplexity_before, exact), (done.perplexity_after, again.model)):
        assert perplexity == pytest.approx(math.exp(text_loss(model, held, 64)), rel=1e-5)
    assert done.perplexity_after == pytest.approx(done.perplexity_before, rel=0.2)
    with pytest.raises(InvalidValue, match="target"):
        quantize_folder(folder, target, method, TEXT)


@torch.no_grad()
def test_scaled_inputs_are_rounded_better_than_plain_ones(tmp_path):
    folder, exact = made(tmp_path / "own", LLAMA)
    quantize_folder(folder, tmp_path / "awq", "awq", TEXT)
    plain = load_model(folder).model
    for module in plain.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.copy_(rounded(module.weight, 32).weight())
    tokens = torch.tensor([character_tokenizer(TEXT).encode(TEXT[-64:])])
    errors = [(model(tokens) - exact(tokens)).norm() for model in (load_model(tmp_path / "awq").model, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_a_folder_of_integers_has_the_names_and_shapes_of_its_format(tmp_path):
    folder, _ = made(tmp_path / "own", LLAMA)
    shapes = {}
    for method in ("gptq", "awq"):
        quantize_folder(folder, tmp_path / method, method, TEXT)
        found = load_file(tmp_path / method / "model.safetensors")
        start = "model.layers.0.mlp.down_proj."
        shapes[method] = {name[len(start) :]: list(each.shape) for name, each in found.items() if start in name}
    assert shapes["gptq"] == {"qweight": [12, 64], "qzeros": [3, 8], "scales": [3, 64], "g_idx": [96]}
    assert shapes["awq"] == {"qweight": [96, 8], "qzeros": [3, 8], "scales": [3, 64]}


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path):
    folder, _ = made(tmp_path / "own", LLAMA)
    with pytest.raises(InvalidValue, match="method"):
        quantize_folder(folder, tmp_path / "x", "q3_k", TEXT)
    with pytest.raises(InvalidValue, match="text"):
        quantize_folder(folder, tmp_path / "x", "gptq", TEXT[:40])
    joined, _ = made(tmp_path / "joined", GPT2)
    with pytest.raises(Incompatible, match="gpt2"):
        quantize_folder(joined, tmp_path / "x", "gptq", TEXT)
    experts, _ = made(tmp_path / "experts", LLAMA | {"num_experts": 2, "num_experts_per_tok": 1})
    with pytest.raises(Incompatible, match="experts"):
        quantize_folder(experts, tmp_path / "x", "awq", TEXT)
    assert not (tmp_path / "x").exists()
