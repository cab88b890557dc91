"""Whole models with weights in FP8, and rows in it too, beside the same roundings in plain torch and float64."""

from __future__ import annotations

import copy

import pytest
import torch
from attn_core import installed
from attn_engine.graphs import DECODE
from attn_kernels_triton.products import CodedLinear
from attn_kernels_triton.products_fp8 import RoundedRowsLinear
from attn_models.loading import load_model
from attn_models.lora.sites import dense_weight
from attn_models.quantization.quantize import quantize_model
from attn_models.weights import fp8_weights as stored
from attn_models.weights.checkpoint_folder import write_folder
from engines import NEW, PROMPTS, generated, model_of
from meanings import become_plain, meaning
from test_products_fp8 import FORMS, layer_of, rows_as_rounded
from torch import nn

pytestmark = pytest.mark.usefixtures("few_processors")


class Defined(nn.Module):
    """A layer's product in float64, of rows rounded by a loop where it rounds them."""

    def __init__(self, layer: CodedLinear) -> None:
        super().__init__()
        self.weights, self.layer = meaning(layer), layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        if isinstance(self.layer, RoundedRowsLinear):
            taken = rows_as_rounded(flat, self.layer.group)
        else:
            taken = flat.to(torch.bfloat16).double()
        return (taken @ self.weights.T).to(rows.dtype).view(*rows.shape[:-1], -1)


def become_defined(packed: nn.Module) -> None:
    """Put definitions in the place of the model's packed layers; all else stays as it is."""
    for name, module in list(packed.named_modules()):
        if isinstance(module, CodedLinear):
            owner, _, leaf = name.rpartition(".")
            setattr(packed.get_submodule(owner), leaf, Defined(module))


@pytest.fixture(autouse=True)
def _only_these(monkeypatch):
    """The kernels of other packages round rows in ways of their own."""
    leave_out(monkeypatch, lambda kernel: not kernel.name.startswith("triton_"))


def leave_out(monkeypatch, which) -> None:
    for kernel in installed().linears:
        if which(kernel):
            monkeypatch.setattr(type(kernel), "available", lambda _self: "left out here")


def without_rows_in_fp8(monkeypatch) -> None:
    """A chip that multiplies no FP8."""
    leave_out(monkeypatch, lambda kernel: kernel.name.endswith("_w8a8"))


@pytest.mark.parametrize("rounds", [True, False], ids=["rows too", "weights alone"])
def test_recorded_decode_steps_in_fp8_say_what_the_roundings_say_and_nearly_what_the_model_says(
    rounds, programs, monkeypatch
):
    if not rounds:
        without_rows_in_fp8(monkeypatch)
    exact, packed = model_of("gqa").double(), model_of("gqa")
    quantize_model(packed, "fp8")
    layers = [module for module in packed.modules() if isinstance(module, CodedLinear)]
    blocks = [layer for layer in layers if layer.form == "fp8"]
    assert len(blocks) == 4 * len(packed.blocks)
    assert {type(layer) for layer in blocks} == {RoundedRowsLinear if rounds else CodedLinear}
    found, graphs = generated(packed, "shared")
    assert (graphs.reasons, graphs.replayed[DECODE]) == ({}, NEW - 1)
    assert programs.count("multiply_codes") >= len(blocks) * NEW
    assert (programs.count("round_rows") >= len(blocks) * NEW) == rounds
    become_defined(packed)
    defined, _ = generated(packed, "shared")
    for prompt, tokens, others in zip(PROMPTS, found, defined, strict=True):
        expected = {token.id: token.logprob for token in others[0].top_logprobs}
        with torch.no_grad():
            true = exact(torch.tensor([prompt]))[0, -1].log_softmax(-1)
        for token in tokens[0].top_logprobs[:2]:
            # A sum that is rounded otherwise may be the other neighbour of a number of e4m3 in the next layer.
            assert abs(token.logprob - expected[token.id]) < 0.06
            assert abs(token.logprob - float(true[token.id])) < 0.3


def in_fp8(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales of blocks of 128 x 128, of outputs, or of all."""
    outputs, inputs = weight.shape
    blocks = {"block": (128, 128), "channel": (1, inputs), "tensor": (outputs, inputs)}[kind]
    scales = torch.empty(-(-outputs // blocks[0]), -(-inputs // blocks[1]))
    codes = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    for down in range(scales.shape[0]):
        for across in range(scales.shape[1]):
            place = (
                slice(down * blocks[0], (down + 1) * blocks[0]),
                slice(across * blocks[1], (across + 1) * blocks[1]),
            )
            scales[down, across] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scales[down, across]).to(torch.float8_e4m3fn)
    return codes, scales.flatten() if kind == "tensor" else scales


def compressed(strategy: str) -> dict:
    said = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": said, "input_activations": {"dynamic": True}}
    named = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**named, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FOLDERS = {
    "block": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "scale_inv"),
    "channel": (compressed("channel"), "scale"),
    "tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "scale"),
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def folder_of(path, kind: str) -> None:
    """A Llama whose projections are in FP8, as its authors would store it."""
    generator = torch.Generator().manual_seed(0)
    config, suffix = FOLDERS[kind]
    layer = "model.layers.0."
    sizes = {"self_attn.q": (128, 128), "self_attn.k": (64, 128), "self_attn.v": (64, 128), "self_attn.o": (128, 128)}
    sizes |= {"mlp.gate": (256, 128), "mlp.up": (256, 128), "mlp.down": (128, 256)}
    tensors = {"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = (torch.randn(40, 128, generator=generator) * 0.3).to(torch.bfloat16)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{layer}{name}.weight"] = torch.ones(128, dtype=torch.bfloat16)
    for name, shape in sizes.items():
        weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        codes, scales = in_fp8(weight, kind)
        tensors |= {f"{layer}{name}_proj.weight": codes, f"{layer}{name}_proj.weight_{suffix}": scales}
        if config.get("activation_scheme") == "static":
            tensors[f"{layer}{name}_proj.input_scale"] = torch.tensor(0.02)
    write_folder(path, LLAMA | {"quantization_config": config}, tensors)


@pytest.mark.parametrize("rounds", [True, False], ids=["rows too", "weights alone"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_in_fp8_is_multiplied_as_it_is_stored(kind, rounds, tmp_path, monkeypatch, programs):
    monkeypatch.setattr(stored.Fp8, "devices", ("cpu",))  # programs are interpreted there
    if not rounds:
        without_rows_in_fp8(monkeypatch)
    folder_of(tmp_path / "model", kind)
    with torch.no_grad():
        plain = load_model(tmp_path / "model", "float64", quantization="none").model
        model = load_model(tmp_path / "model", "float32", quantization="fp8").model
        tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
        found = model(tokens).double()
        layers = [module for module in model.modules() if isinstance(module, CodedLinear)]
        form = "fp8_block" if kind == "block" else "fp8_channel"
        assert [layer.form for layer in layers] == [*[form] * 4, "int8"]  # joined projections, and the unembedding
        rounding = programs.count("round_groups" if kind == "block" else "round_rows")
        assert rounding == rounds * (programs.count("multiply_codes") - 1) > -1
        become_defined(model)
        torch.testing.assert_close(found, model(tokens).double(), rtol=0, atol=0.02)
        exact = plain(tokens)
        # Weights are those that are stored; what is lost is of the rows, and of an unembedding in int8.
        error = float((found - exact).norm() / exact.norm())
        assert error < (0.08 if rounds else 0.01), error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [CodedLinear, RoundedRowsLinear])
def test_what_adapters_read_of_a_layer_are_its_weights(kind, form):
    layer = layer_of(kind, form, 20, 256, biased=True)
    weights = meaning(layer)
    # The quotient by a row's scale, which is no power of two, is rounded in float32.
    slack = 1e-6 * (weights.abs() + layer.bias.abs()[:, None])
    assert ((dense_weight(layer, 256).double() - weights).abs() <= slack).all()


def test_packed_weights_of_both_kinds_are_the_same_numbers():
    model = model_of("gqa")
    both = [copy.deepcopy(model) for _ in range(2)]
    for packed, way in zip(both, ("w8a8", "w8a16"), strict=True):
        quantize_model(packed, "fp8", kernel=f"triton_fp8_{way}")
        become_plain(packed)
    weights = [[m.weight for m in packed.modules() if isinstance(m, nn.Linear)] for packed in both]
    assert len(weights[0]) == 4 * len(model.blocks) + 1  # the unembedding, in int8
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
