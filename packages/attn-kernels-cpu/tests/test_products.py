"""Products of packed weights, against float64 and against weights quantised in plain torch."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue

pytestmark = pytest.mark.usefixtures("_kernels")

SIZES = [(16, 32), (80, 64), (33, 96), (7, 160)]
"""Outputs and inputs: whole panels, a part of one, and fewer than one."""
ROWS = [1, 2, 3, 5, 12, 29]


def packed(name, weight, bias=None):
    return installed().linears.get(f"cpu_{name}").pack(weight, bias)


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_floats_are_multiplied_as_in_float64(outputs, inputs, rows):
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    exact = x.double() @ weight.double().T + bias
    assert relative(packed("float32", weight, bias)(x), exact) < 1e-6
    rounded = weight.bfloat16()
    exact = x.double() @ rounded.double().T + bias
    assert relative(packed("bfloat16", weight, bias)(x), exact) < 1e-6


def test_bfloat16_weights_give_the_bits_of_the_same_weights_in_float32():
    torch.manual_seed(3)
    weight, x = torch.randn(33, 96).bfloat16(), torch.randn(5, 96)
    assert torch.equal(packed("bfloat16", weight)(x), packed("float32", weight.float())(x))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_whole_numbers_are_multiplied_without_any_error(outputs, inputs, rows):
    """Weights and inputs that int8 and int4 hold exactly: what is left is rounding of float32."""
    torch.manual_seed(rows)
    whole = torch.randint(-127, 128, (outputs, inputs)).float()
    whole[:, 0] = 127
    x = torch.randint(-127, 128, (rows, inputs)).float()
    x[:, ::32] = 127
    assert relative(packed("int8", whole)(x), x.double() @ whole.double().T) < 1e-6
    nibbles = torch.randint(0, 16, (outputs, inputs)).float()
    nibbles[:, ::32], nibbles[:, 1::32] = 0, 15
    shifted = nibbles * 0.5 - 3
    assert relative(packed("int4", shifted)(x), x.double() @ shifted.double().T) < 1e-5


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(name, threads):
    torch.manual_seed(0)
    layer = packed(name, torch.randn(200, 64))
    x = torch.randn(9, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer(x)
        torch.set_num_threads(threads)
        assert torch.equal(layer(x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
def test_a_row_alone_gets_the_bits_that_it_gets_in_a_crowd(name):
    """In every kind of tile: of many rows, of four, of two and of one."""
    torch.manual_seed(4)
    layer, x = packed(name, torch.randn(70, 96)), torch.randn(31, 96)
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), layer(x))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rows_of_any_size_lose_no_more_than_their_own_rounding(name):
    torch.manual_seed(1)
    weight = torch.randn(64, 96)
    layer = packed(name, weight)
    for size in (1e-30, 1e-12, 1.0, 1e12, 1e30):
        x = torch.randn(3, 96) * size
        assert relative(layer(x), x.double() @ weight.double().T) < (0.02 if name == "int8" else 0.12)
    assert torch.equal(layer(torch.zeros(2, 96)), torch.zeros(2, 64))


def test_rows_come_back_in_their_own_type_and_shape():
    layer = packed("int8", torch.randn(24, 32))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        out = layer(torch.randn(2, 3, 32, dtype=dtype))
        assert (out.shape, out.dtype) == ((2, 3, 24), dtype)
    assert layer(torch.randn(0, 32)).shape == (0, 24)


def test_weights_of_four_bits_are_found_again():
    """Q4_1's own weights: step and least value in half precision, the least and the greatest number in each group."""
    torch.manual_seed(2)
    numbers = torch.randint(0, 16, (16, 2, 32))
    numbers[..., 3], numbers[..., 9] = 0, 15
    step, least = torch.rand(16, 2).half().float() * 0.1, torch.randn(16, 2).half().float()
    step = step.half().float()
    weight = (numbers * step[..., None] + least[..., None]).view(16, 64)
    eye = torch.eye(64) * 127  # each input alone in its group is held exactly
    found = packed("int4", weight)(eye).T / 127
    torch.testing.assert_close(found, weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 63), (2, 65), (1,), (3, 0)])
def test_rows_of_another_size_are_refused_before_memory_is_read(shape):
    layer = packed("float32", torch.randn(16, 64))
    with pytest.raises(InvalidValue, match=r"rows: .*\[\.\.\., 64\] on the cpu"):
        layer(torch.randn(shape))


@pytest.mark.parametrize("name", ["float32", "int8", "int4"])
def test_a_model_that_changes_its_type_leaves_packed_weights_valid(name):
    layer = packed(name, torch.randn(16, 64), torch.randn(16))
    rows = torch.randn(3, 64)
    before = layer(rows)
    torch.nn.Sequential(layer).double().half()
    assert torch.equal(layer(rows), before)


def test_no_rows_give_no_outputs():
    assert packed("int8", torch.randn(16, 64))(torch.randn(0, 64)).shape == (0, 16)
