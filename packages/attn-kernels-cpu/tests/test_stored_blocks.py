"""Weights in the blocks of files are multiplied as they are, against what the gguf library says that they mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.kernels.linear import BLOCK_FORMATS, LinearProblem, choose_linear, explain_linear
from attn_kernels_cpu.forms import FORMS
from attn_kernels_cpu.packed import PackedLinear
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

HALVES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q4_k": (0, 2), "q6_k": (208,), "int4_zeros": (0,)}
"""The bytes of a block at which half floats begin."""
ROWS = [1, 2, 3, 5, 29]


def blocks(form, outputs, count, seed=0, draw=lambda random, shape: random.standard_normal(shape) * 0.01):
    """Rows of blocks of any bits with small scales of both signs, and the float32 weights that they mean."""
    random, size = np.random.default_rng(seed), FORMS[form].block
    raw = random.integers(0, 256, (outputs, count, size), dtype=np.uint8)
    for place in HALVES[form]:
        scales = draw(random, (outputs, count)).astype(np.float16)
        raw[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    if form == "int4_zeros":
        numbers = np.concatenate([raw[..., 3:] & 15, raw[..., 3:] >> 4], -1).astype(np.float32)
        scales = np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float32)
        weight = (scales * (numbers - raw[..., 2:3])).reshape(outputs, -1)
    else:
        weight = dequantize(raw.reshape(outputs, -1), GGMLQuantizationType[form.upper()])
    return torch.from_numpy(raw.reshape(outputs, -1)), torch.from_numpy(weight.copy())


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def powers_of_two(random, shape):
    """Scales whose products with whole numbers float32 adds up without rounding."""
    return random.choice([-1.0, 1.0], shape) * 2.0 ** -random.integers(0, 3, shape)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("outputs", [7, 16, 83, 97])
@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_inputs_of_few_bits_times_blocks_lose_no_bit_of_either(form, outputs):
    """Of numbers whose sums float32 holds the result is exact, whatever bits codes and scales have."""
    raw, weight = blocks(form, outputs, 1 if FORMS[form].group > 32 else 3, draw=powers_of_two)
    torch.manual_seed(0)
    bias = torch.randint(-9, 10, (outputs,)).float()
    layer = PackedLinear(f"{form}_int16", raw, bias)
    for rows in ROWS:
        x = torch.randint(-9, 10, (rows, weight.shape[1])).float()
        assert torch.equal(layer(x).double(), x.double() @ weight.double().T + bias)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_inputs_are_rounded_to_sixteen_bits_and_sums_as_in_float32(form):
    """An input is off by at most half a step, which is 2^-14 of the power of two below the largest of its 32."""
    raw, weight = blocks(form, 83, 2)
    torch.manual_seed(0)
    bias = torch.randn(83)
    layer, plain = PackedLinear(f"{form}_int16", raw, bias), PackedLinear("float32", weight, bias)
    for rows in ROWS:
        for size in (1e-20, 1.0, 1e20):
            x = torch.randn(rows, weight.shape[1]) * torch.logspace(-2, 2, weight.shape[1]) * size
            largest = x.view(rows, -1, 32).abs().amax(-1, keepdim=True).double()
            steps = 2.0 ** (largest.log2() + 2**-16).floor() * 2**-14
            most = (steps / 2).expand(-1, -1, 32).reshape(rows, -1) @ weight.double().abs().T
            exact = x.double() @ weight.double().T + bias
            summed = 4 * (plain(x) - exact).abs().max() + 1e-6 * exact.abs()
            assert ((layer(x) - exact).abs() <= most + summed).all()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_inputs_that_int8_holds_are_multiplied_without_any_error(form, rows):
    """What is left is rounding of float32: no bit of a weight is lost."""
    raw, weight = blocks(form, 40, 3, seed=rows)
    torch.manual_seed(rows)
    x = torch.randint(-127, 128, (rows, weight.shape[1])).float()
    x[:, ::32] = 127
    assert relative(PackedLinear(form, raw, None)(x), x.double() @ weight.double().T) < 1e-6


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_other_inputs_lose_no_more_than_their_own_rounding_to_int8(form):
    raw, weight = blocks(form, 40, 3)
    torch.manual_seed(1)
    x = torch.randn(6, weight.shape[1])
    assert relative(PackedLinear(form, raw, None)(x), x.double() @ weight.double().T) < 0.02


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", [f"{form}{kind}" for form in BLOCK_FORMATS for kind in ("", "_int16")])
def test_a_row_alone_gets_the_bits_that_it_gets_in_a_crowd_and_its_largest_output(form):
    layer = PackedLinear(form, blocks(form.removesuffix("_int16"), 70, 2)[0], None)
    torch.manual_seed(4)
    x = torch.randn(31, layer.inputs)
    whole = layer(x)
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), whole)
    assert torch.equal(layer.largest(x), whole.argmax(-1))


@pytest.mark.parametrize("form", [f"{form}{kind}" for form in BLOCK_FORMATS for kind in ("", "_int16")])
def test_every_instruction_set_gives_the_same_bits(with_both, form):
    def compute():
        layer = PackedLinear(form, blocks(form.removesuffix("_int16"), 83, 2)[0], torch.linspace(-1, 1, 83))
        torch.manual_seed(5)
        x = torch.randn(14, layer.inputs) * torch.logspace(-30, 30, 14)[:, None]
        return [layer(x), layer(x[:1]), layer(x[3:6]), layer.largest(x)]

    for one, other in with_both(compute):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("_kernels")
def test_layers_in_several_kinds_of_blocks_are_one_layer():
    made = [blocks("q4_k", 33, 1), blocks("q6_k", 16, 1), blocks("q4_1", 24, 8)]
    forms = ["q4_k_int16", "q6_k", "q4_1"]
    parts = [PackedLinear(form, raw, None) for form, (raw, _) in zip(forms, made, strict=True)]
    torch.manual_seed(0)
    x = torch.randn(5, 256)
    whole = PackedLinear.joined(parts)
    assert torch.equal(whole(x), torch.cat([part(x) for part in parts], -1))
    assert (whole.inputs, whole.outputs, whole.largest(x)) == (256, 73, None)


@pytest.mark.usefixtures("_best_kernels")
@pytest.mark.parametrize("weight", [torch.zeros(16, 34), torch.zeros(16, 33, dtype=torch.uint8)])
def test_what_are_no_blocks_is_refused_before_memory_is_read(weight):
    with pytest.raises(InvalidValue, match=r"weight: .* torch.uint8 \[outputs, a multiple of 34\] for q8_0"):
        PackedLinear("q8_0", weight, None)


@pytest.mark.usefixtures("_best_kernels")
@pytest.mark.parametrize("form", BLOCK_FORMATS)
def test_who_asks_for_float32_gets_inputs_of_sixteen_bits(form):
    problem = LinearProblem(weights=form, inputs=512, outputs=64, dtype="uint8")
    assert choose_linear(installed().linears, problem).name == f"cpu_{form}"
    asked = LinearProblem(weights=form, inputs=512, outputs=64, dtype="uint8", exact=True, float32=True)
    assert choose_linear(installed().linears, asked).name == f"cpu_{form}_int16"
    odd = LinearProblem(weights=form, inputs=516, outputs=64, dtype="uint8")
    assert not any(verdict.accepted for verdict in explain_linear(installed().linears, odd))
