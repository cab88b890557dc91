"""Weights in the blocks of files are multiplied as they are, against what the gguf library says that they mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue, KernelRefused
from attn_core.kernels.linear import BLOCK_FORMATS, LinearProblem, choose_linear
from attn_engine.graphs import DECODE
from attn_kernels_triton import products
from attn_kernels_triton.backends.linears import HELD_BITS
from attn_kernels_triton.products import CodedLinear
from attn_kernels_triton.stored_blocks import STORED_FORMS, stored_linear
from attn_models.quantization.block_tensor import BlockTensor
from attn_models.quantization.quantize import join_projections
from attn_models.weights.block_layouts import GGUF_LAYOUTS, INT4_ZEROS
from engines import NEW, generated, model_of
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from meanings import become_plain, meaning, require_product
from torch import nn

LAYOUTS = {layout.weights: layout for layout in (*GGUF_LAYOUTS.values(), INT4_ZEROS)}


def blocks(form: str, outputs: int, count: int) -> torch.Tensor:
    """Rows of blocks of any bits, with small scales of both signs."""
    random, layout = np.random.default_rng(outputs), LAYOUTS[form]
    raw = random.integers(0, 256, (outputs, count, layout.nbytes), dtype=np.uint8)
    for place in layout.halves:
        scales = (random.standard_normal((outputs, count)) * 0.01).astype(np.float16)
        raw[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    return torch.from_numpy(raw.reshape(outputs, -1))


def some(form: str, outputs: int) -> torch.Tensor:
    return blocks(form, outputs, 1 if STORED_FORMS[form].inputs > 32 else 5)


def test_every_format_of_files_has_a_kernel():
    assert set(STORED_FORMS) == set(BLOCK_FORMATS) == set(HELD_BITS)


@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_no_bit_of_a_weight_is_lost(form):
    raw = some(form, 9)
    expected = torch.from_numpy(LAYOUTS[form].dequantized(raw.numpy())).double()
    # The library rounds each number to float32; ours are products and sums of float32 in float64.
    found = meaning(stored_linear(form, raw, None))
    slack = 2.0**-23 * (expected.abs() + expected.abs().max())
    assert ((found - expected).abs() <= slack).all()


@pytest.mark.parametrize("form", BLOCK_FORMATS)
@pytest.mark.parametrize(("dtype", "rows", "outputs"), [(torch.bfloat16, 3, 70), (torch.float32, 1, 5)])
def test_a_product_is_that_of_the_weights_in_the_file(form, dtype, rows, outputs):
    torch.manual_seed(0)
    layer = stored_linear(form, some(form, outputs), torch.randn(outputs) if outputs % 2 else None)
    require_product(layer, torch.randn(rows, layer.inputs).to(dtype))


@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_a_row_alone_has_the_bits_that_it_has_in_a_crowd(form, monkeypatch, programs):
    monkeypatch.setattr(products, "FEWEST_TURNS", 1)
    monkeypatch.setattr(products, "processors", lambda _: 3)
    torch.manual_seed(0)
    layer = stored_linear(form, blocks(form, 20, 512 // STORED_FORMS[form].inputs), None)
    rows = torch.randn(17, 512).to(torch.bfloat16)
    crowd = layer(rows)
    assert programs == ["multiply_codes", "add_parts"]
    assert torch.equal(layer(rows[2:3])[0], crowd[2])


@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_dispatch_takes_these_kernels_where_inputs_may_have_16_bits(form):
    problem = LinearProblem(weights=form, inputs=512, outputs=64, dtype="uint8", exact=True)
    assert choose_linear(installed().linears, problem, f"triton_{form}").name == f"triton_{form}"
    with pytest.raises(KernelRefused):
        choose_linear(installed().linears, replace(problem, float32=True), f"triton_{form}")


@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_bytes_that_are_no_whole_blocks_are_refused(form):
    for raw in (some(form, 3)[:, :-1], some(form, 3).to(torch.int16), some(form, 3)[0]):
        with pytest.raises(InvalidValue, match=f"the layout of {form}"):
            stored_linear(form, raw, None)


@pytest.mark.usefixtures("few_processors")
def test_a_model_is_served_in_the_blocks_of_its_file(monkeypatch, programs):
    for kernel in installed().linears:
        if kernel.name.startswith("cpu_"):
            monkeypatch.setattr(type(kernel), "available", lambda _self: "left out here")
    model = model_of("gqa").to(torch.bfloat16)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear) and not module.in_features % 32:
            raw = quantize(module.weight.detach().float().numpy(), GGMLQuantizationType.Q8_0)
            kept = BlockTensor(torch.from_numpy(raw), GGUF_LAYOUTS["Q8_0"])
            module.weight = nn.Parameter(kept, requires_grad=False)
    join_projections(model, torch.bfloat16)
    found, graphs = generated(model, "shared")
    assert (graphs.reasons, graphs.replayed[DECODE]) == ({}, NEW - 1)
    stored = [module for module in model.modules() if isinstance(module, CodedLinear)]
    assert {layer.form for layer in stored} == {"q8_0"}
    assert len(stored) >= 3 * len(model.blocks)
    assert programs.count("multiply_codes") >= len(stored) * NEW
    become_plain(model)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.to(torch.bfloat16)
    defined, _ = generated(model, "shared")
    for tokens, others in zip(found, defined, strict=True):
        expected = {token.id: token.logprob for token in others[0].top_logprobs}
        for token in tokens[0].top_logprobs[:2]:
            assert abs(token.logprob - expected[token.id]) < 0.05  # weights are rounded to bfloat16 there
