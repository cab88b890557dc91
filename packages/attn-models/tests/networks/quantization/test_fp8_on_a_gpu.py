"""Weights in FP8, of any checkpoint and as a checkpoint stores them, on a GPU, which is pretended here."""

from __future__ import annotations

import json
import logging
from collections import Counter

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_core.kernels import devices
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.lora.sites import dense_weight, lora_sites
from attn_models.quantization.block_tensor import BlockTensor
from attn_models.weights import read_folder
from attn_models.weights.checkpoint_folder import write_folder
from attn_models.weights.quantized_tensors import with_plain_weights
from attn_schema.decoder import DecoderConfig
from pretend_cuda import DEVICE, PretendCudaTensor, pretended_gpu
from safetensors.torch import load_file

pytest.importorskip("attn_kernels_triton")
pytest.importorskip("triton")

SIZES = {"vocab_size": 48, "max_seq_len": 32, "hidden_size": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
KIND = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "mechanism": "gqa", "intermediate_size": 256}
CHIPS = {
    "hopper": (devices.Gpu("NVIDIA H100", (9, 0)), "RoundedRowsLinear"),
    "ada": (devices.Gpu("NVIDIA L40S", (8, 9)), "RoundedRowsLinear"),
    "ampere": (devices.Gpu("NVIDIA A100-SXM4-80GB", (8, 0)), "CodedLinear"),
}
"""GPUs, and the class of layer that packs floats on each."""
ANSWERS = {
    "is_available": True,
    "device_count": 1,
    "get_arch_list": ["sm_80", "sm_90"],
    "mem_get_info": (2**33, 2**33),
    "memory_reserved": 0,
    "memory_allocated": 0,
}


@pytest.fixture
def gpu(monkeypatch, request):
    """A pretended GPU: an H200, or the one that the test names."""
    for name, answer in ANSWERS.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    with pretended_gpu(*([request.param] if hasattr(request, "param") else [])) as counter, torch.inference_mode():
        yield counter


def model_of(**fields) -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderConfig.from_plain(SIZES | KIND | fields)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    save_model(folder, model_of(), layout="llama")
    return folder


BLOCKED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def compressed(strategy):
    said = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    group = {"targets": ["Linear"], "weights": said, "input_activations": {"dynamic": True, "strategy": "token"}}
    named = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {**named, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


FOLDERS = {
    "block": (BLOCKED, "fp8_block"),
    "whole, static": (STATIC, "fp8_channel"),
    "compressed, channel": (compressed("channel"), "fp8_channel"),
    "compressed, tensor": (compressed("tensor"), "fp8_channel"),
}


def store(target, source, config, *, kept=()):
    """The folder with its projections in FP8 of any bits, but for those whose names hold one of `kept`."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(source / "model.safetensors")
    block = config.get("weight_block_size")
    strategy = config.get("config_groups", {}).get("group_0", {}).get("weights", {}).get("strategy")
    for name in [name for name in tensors if name.endswith("_proj.weight") and not any(k in name for k in kept)]:
        outputs, inputs = tensors[name].shape
        codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
        codes[(codes & 127) == 127] = 0
        tensors[name] = codes.view(torch.float8_e4m3fn)
        shape = (-(-outputs // block[0]), -(-inputs // block[1])) if block else (1,)
        shape = (outputs, 1) if strategy == "channel" else shape
        suffix = "weight_scale_inv" if block else "weight_scale"
        tensors[name.removesuffix("weight") + suffix] = torch.rand(shape, generator=generator) * 1e-3
        if config.get("activation_scheme") == "static":
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    plain = json.loads((source / "config.json").read_text())
    write_folder(target, plain | {"quantization_config": config}, tensors)
    return target


def packed(model):
    """How often each format is multiplied by which class of layer."""
    return Counter((type(module).__name__, module.form) for module in model.modules() if hasattr(module, "form"))


def loaded(folder, quantization, dtype="bfloat16"):
    return load_model(folder, dtype, device="cuda", quantization=quantization).model


def run(model, gpu):
    """One pass over whole sequences, its counts."""
    tokens = torch.arange(8, device=DEVICE).view(1, -1)
    model(tokens)  # what is made once, such as a mask, is copied
    gpu.reset()
    assert isinstance(model(tokens), PretendCudaTensor)
    assert not gpu.syncs
    return gpu.programs


@pytest.mark.parametrize(("gpu", "kind"), CHIPS.values(), indirect=["gpu"], ids=CHIPS)
def test_any_checkpoint_is_packed_in_fp8_and_the_chip_decides_whether_rows_are_too(plain, gpu, kind):
    model = loaded(plain, "fp8")
    assert packed(model) == {(kind, "fp8"): 8, ("CodedLinear", "int8"): 1}
    assert model.quantization == "fp8"
    programs = run(model, gpu)
    assert (programs["round_rows"] > 0) == (kind == "RoundedRowsLinear")
    assert programs["multiply_codes"] - 1 >= 8


def test_a_second_gpu_that_multiplies_no_fp8_is_refused_by_name(plain, gpu, monkeypatch):
    """The first GPU decides which kernel is chosen; the model is on another."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA RTX A6000")
    with pytest.raises(InvalidValue, match=r"weight\.device: 'NVIDIA RTX A6000, cuda:0' .* capability 8\.9 or more"):
        loaded(plain, "fp8")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_server_keeps_fp8_as_it_is_stored_and_inputs_as_they_are(plain, gpu, name, tmp_path, caplog):
    config, form = FOLDERS[name]
    with caplog.at_level(logging.INFO):
        model = loaded(store(tmp_path / "stored", plain, config), "auto")
    assert packed(model) == {("CodedLinear", form): 8}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(tensor.device == DEVICE for tensor in [*model.parameters(), *model.buffers()])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "inputs keep 16 bits, whatever the checkpoint says of them; --quantization fp8" in caplog.text
    assert not run(model, gpu).keys() & {"round_rows", "round_groups"}


@pytest.mark.parametrize("name", FOLDERS)
def test_asked_for_fp8_it_rounds_inputs_as_they_come_and_no_stored_weight(plain, gpu, name, tmp_path, caplog):
    config, form = FOLDERS[name]
    with caplog.at_level(logging.INFO):
        model = loaded(store(tmp_path / "stored", plain, config), "fp8")
    assert packed(model) == {("RoundedRowsLinear", form): 8, ("CodedLinear", "int8"): 1}
    assert "static scale (input_scale)" in caplog.text
    assert model.embedding.table.dtype == torch.bfloat16
    assert run(model, gpu)["round_groups" if form == "fp8_block" else "round_rows"] >= 8


def test_weights_that_are_not_stored_in_fp8_are_packed_beside_those_that_are(plain, gpu, tmp_path):
    folder = store(tmp_path / "stored", plain, BLOCKED, kept=("down_proj", "k_proj"))
    kept = packed(loaded(folder, "auto"))
    assert kept == {("CodedLinear", "fp8_block"): 2 * 4}  # queries, values, outputs, gates beside inputs
    assert packed(loaded(folder, "fp8")) == {
        ("RoundedRowsLinear", "fp8_block"): 2 * 4,
        ("RoundedRowsLinear", "fp8"): 2 * 2,
        ("CodedLinear", "int8"): 1,
    }


def test_other_formats_of_as_many_bits_keep_what_is_stored_and_fewer_do_not(plain, gpu, tmp_path):
    folder = store(tmp_path / "stored", plain, BLOCKED)
    assert packed(loaded(folder, "int8")) == {("CodedLinear", "fp8_block"): 8, ("CodedLinear", "int8"): 1}
    assert packed(loaded(folder, "int4")) == {("CodedLinear", "int4"): 8, ("CodedLinear", "int8"): 1}
    assert not packed(loaded(folder, "none"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            BLOCKED | {"weight_block_size": [40, 40]},
            "are 40 x 40 and it has 128 inputs; only rows of whole blocks of 128 inputs",
        ),
        (
            BLOCKED | {"weight_block_size": [128, 64]},
            "are 128 x 64 and it has 128 inputs; only rows of whole blocks of 128 inputs",
        ),
    ],
)
def test_blocks_of_other_sizes_are_dequantised_which_is_said_once(plain, gpu, config, said, tmp_path, caplog):
    folder = store(tmp_path / "stored", plain, config)
    with caplog.at_level(logging.WARNING):
        model = loaded(folder, "auto")
    assert not packed(model)
    told = [record.getMessage() for record in caplog.records if "are dequantised" in record.getMessage()]
    assert len(told) == len({128, 256})  # rows of two lengths
    assert said in told[0]
    assert packed(loaded(folder, "fp8"))["RoundedRowsLinear", "fp8"] == 8


def test_a_model_in_float32_does_not_keep_them_unasked_and_says_why(plain, gpu, tmp_path, caplog):
    folder = store(tmp_path / "stored", plain, BLOCKED)
    with caplog.at_level(logging.WARNING):
        model = loaded(folder, "auto", "float32")
    assert not packed(model)
    assert "weights stored as fp8_block are" in caplog.text
    assert "--dtype bfloat16" in caplog.text


@pytest.mark.parametrize("config", [BLOCKED, STATIC, compressed("channel"), BLOCKED | {"weight_block_size": [40, 40]}])
def test_memory_is_reckoned_before_loading_to_the_byte(plain, gpu, config, tmp_path):
    folder = store(tmp_path / "stored", plain, config, kept=("q_proj",))
    tensors = with_plain_weights(read_folder(folder, device=DEVICE), in_blocks=True).tensors
    found = [tensors[name] for name in tensors]
    taken = sum(t.blocks.nbytes if isinstance(t, BlockTensor) else 2 * t.numel() for t in found)
    assert sum(2 * t.numel() for t in found) - tensors.saved_bytes(torch.bfloat16) == taken
    kept = any(isinstance(tensor, BlockTensor) for tensor in found)
    assert (tensors.types() == {"BF16"}) == kept == (config.get("weight_block_size") != [40, 40])


def test_on_a_cpu_they_are_dequantised_as_ever(plain, tmp_path):
    folder = store(tmp_path / "stored", plain, BLOCKED)
    tensors = with_plain_weights(read_folder(folder), in_blocks=True).tensors
    assert not any(isinstance(tensors[name], BlockTensor) for name in tensors)
    assert tensors.saved_bytes(torch.bfloat16) == 0


def test_experts_a_tied_unembedding_and_narrow_layers_are_as_with_int8(gpu):
    from attn_models.quantization.quantize import quantize_model
    from pretend_cuda import to_pretended

    found = {}
    for form in ("int8", "fp8"):
        model = model_of(num_experts=4, num_experts_per_tok=2, n_shared_experts=1)
        to_pretended(model)
        quantize_model(model, form, torch.bfloat16)
        layers = {name for name, module in model.named_modules() if hasattr(module, "form")}
        plain = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
        found[form] = layers, plain
    assert found["int8"] == found["fp8"]
    assert "head" in found["fp8"][0]
    assert any(".experts.3." in name for name in found["fp8"][0])
    assert any("router" in name for name in found["fp8"][1])


def test_adapters_find_the_layers_of_a_model_in_fp8(plain, gpu, tmp_path):
    model = loaded(store(tmp_path / "stored", plain, BLOCKED), "fp8")
    sites = lora_sites(model)
    site = sites["blocks.0.attention.value"]
    assert (type(site.module).__name__, site.start, site.outputs) == ("RoundedRowsLinear", 192, 64)
    assert dense_weight(site.module, site.inputs).shape == (256, 128)
