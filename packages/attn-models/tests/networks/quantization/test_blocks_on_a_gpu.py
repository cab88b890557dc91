"""Weights that a file stores in blocks stay in these on a GPU, which is pretended here."""

from __future__ import annotations

import logging

import pytest
import torch
from attn_core import installed
from attn_models.loading import load_model
from attn_models.sources import convert
from pretend_cuda import DEVICE, PretendCudaTensor, pretended_gpu

pytest.importorskip("attn_kernels_triton")
pytest.importorskip("triton")


@pytest.fixture(scope="module")
def folder(quantised_llama, tmp_path_factory):
    """A model of all formats, as it is stored."""
    return convert(quantised_llama.path, tmp_path_factory.mktemp("blocks") / "stored", "stored")


@pytest.fixture
def gpu(monkeypatch):
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_arch_list": ["sm_90"],
        "mem_get_info": (2**33, 2**33),
        "memory_reserved": 0,
        "memory_allocated": 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    with pretended_gpu() as counter, torch.inference_mode():
        yield counter


def coded(model):
    """The layers that are multiplied as they are stored, and those that are packed."""
    return [module for module in model.modules() if type(module).__name__ == "CodedLinear"]


def forms(model):
    """The formats of these layers."""
    return {module.form for module in coded(model)}


def on_the_host(model):
    named = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in named if tensor.device != DEVICE]


def test_a_server_keeps_every_format_of_the_file(folder, gpu, caplog):
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, device="cuda", quantization="auto").model
    assert forms(model) == {"q8_0", "q4_0", "q4_1", "q4_k", "q6_k"}
    assert on_the_host(model) == []
    floats = {p.dtype for p in [*model.parameters(), model.embedding.weight] if p.ndim > 1}
    assert floats == {torch.bfloat16}
    assert "stored as" not in caplog.text


def test_products_of_blocks_are_programs_and_wait_for_nothing(folder, gpu):
    model = load_model(folder, device="cuda", quantization="auto").model
    tokens = torch.arange(8, device=DEVICE).view(1, -1)
    model(tokens)  # what is made once, such as a mask, is copied
    gpu.reset()
    assert isinstance(model(tokens), PretendCudaTensor)
    assert gpu.programs["multiply_codes"] == len(coded(model)) > 0, "each layer is multiplied once"
    assert not gpu.syncs


@pytest.mark.parametrize(("quantization", "kept"), [("int8", "q6_k"), ("int4", "q4_k"), ("fp8", "q6_k")])
def test_so_do_packed_models_where_blocks_take_no_more_bits(folder, gpu, quantization, kept):
    found = forms(load_model(folder, device="cuda", quantization=quantization).model)
    assert {kept, "q4_0", "q4_1"} < found
    assert ("q8_0" in found) == (quantization != "int4")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_no_kernel_multiplies_is_widened_and_said_once_for_each_format(folder, gpu, caplog, monkeypatch, dtype):
    for kernel in installed().linears:
        if kernel.name.startswith("triton_q"):
            monkeypatch.setattr(type(kernel), "available", lambda _self: "not on this machine")
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, dtype, device="cuda", quantization="auto").model
    assert forms(model) == set()
    assert on_the_host(model) == []
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {getattr(torch, dtype)}
    said = [record.getMessage() for record in caplog.records if "weights stored as" in record.getMessage()]
    assert len(said) == len({line.split(" are ")[0] for line in said}) == 5
    why = "not on this machine" if dtype == "bfloat16" else "--dtype bfloat16"
    assert all(why in line and dtype in line for line in said)
