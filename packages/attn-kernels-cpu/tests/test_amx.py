"""Products in tiles of bfloat16 (AMX), against float64."""

from __future__ import annotations

import pytest
import torch
from attn_core import installed
from attn_core.errors import KernelRefused
from attn_kernels_cpu.chip import TILES, without

pytestmark = pytest.mark.usefixtures("_tiles")

KERNELS = ["amx_bfloat16", "amx_bfloat16_rounded", "amx_int8"]
SIZES = [(16, 32), (80, 64), (33, 96), (7, 70), (65, 33)]
"""Outputs and inputs: whole tiles, and parts of them on either side."""


def packed(name, weight, bias=None):
    return installed().linears.get(name).pack(weight, bias)


def relative(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 11, 16, 17, 40])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_inputs_in_three_parts_lose_nothing_of_float32(outputs, inputs, rows):
    """The error against float64 is that of float32 sums."""
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs), torch.randn(rows, inputs)
    exact = x.double() @ weight.double().T + bias
    assert relative(packed("amx_bfloat16", weight, bias)(x), exact) < 3e-7


@pytest.mark.parametrize("rows", [1, 6, 17])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_rounded_inputs_lose_their_own_rounding_only(outputs, inputs, rows):
    """Against float64 on the rounded inputs the error is that of float32 sums."""
    torch.manual_seed(rows)
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(rows, inputs)
    exact = x.bfloat16().double() @ weight.double().T
    assert relative(packed("amx_bfloat16_rounded", weight)(x), exact) < 3e-7


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_whole_numbers_are_multiplied_without_any_error(outputs, inputs, rows):
    """Weights and inputs that eight and sixteen bits hold exactly: what is left is rounding of float32."""
    torch.manual_seed(rows)
    weight, x = torch.randint(-127, 128, (outputs, inputs)), torch.randint(-32512, 32513, (rows, inputs))
    weight[:, 0], x[:, 0] = 127, 32512
    found = packed("amx_int8", weight.float(), torch.ones(outputs))(x.float())
    assert relative(found, x.double() @ weight.double().T + 1) < 3e-7


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_int8_weights_lose_their_own_rounding_only(size):
    """Inputs in sixteen bits add nothing that could be seen beside it."""
    torch.manual_seed(1)
    weight, x = torch.randn(64, 96), torch.randn(3, 96) * size
    steps = weight.abs().amax(1, keepdim=True) / 127
    exact = x.double() @ ((weight / steps).round() * steps).double().T
    assert relative(packed("amx_int8", weight)(x), exact) < 1e-4


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_alone_gets_the_bits_that_it_gets_in_a_crowd(name):
    """Whatever tile and place a row comes to lie in, with however many threads."""
    torch.manual_seed(0)
    layer, x = packed(name, torch.randn(100, 77), torch.randn(100)), torch.randn(1700, 77)
    together = layer(x)
    for row in (0, 4, 5, 15, 16, 31, 32, 1699):
        assert torch.equal(layer(x[row : row + 1]), together[row : row + 1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("outputs", "inputs"), [(80, 64), (33, 96), (7, 160), (200, 1536)])
@pytest.mark.parametrize("threads", [1, 3])
def test_four_bits_in_tiles_give_the_bits_that_they_give_row_by_row(outputs, inputs, threads):
    """Dots of a group are whole numbers either way, and what is made of them is summed in one order."""
    torch.manual_seed(outputs)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(300, inputs)
    x[3, 5] = float("nan")
    tiled, expected = packed("amx_int4", weight, bias), packed("cpu_int4", weight, bias)(x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in (1, 3, 4, 5, 9, 16, 17, 40, 300):
            torch.testing.assert_close(tiled(x[:rows]), expected[:rows], rtol=0, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(before)


def test_rows_of_any_size_keep_their_bits():
    """From where parts would vanish to where rounding up would overflow."""
    torch.manual_seed(1)
    weight = torch.randn(64, 96).bfloat16()
    layer = packed("amx_bfloat16", weight)
    for size in (1e-30, 1e-12, 1.0, 1e12, 1e30):
        x = torch.randn(3, 96) * size
        assert relative(layer(x), x.double() @ weight.double().T) < 3e-7
    largest = torch.zeros(1, 96)
    largest[0, 0] = torch.finfo(torch.float32).max
    unit = packed("amx_bfloat16", torch.eye(96))
    assert torch.equal(unit(largest), largest)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_stays_in_its_row(name, value):
    """Infinity times one is infinity but for int8, whose step it would be; NaN, whatever its payload, stays NaN."""
    x = torch.ones(4, 33)
    x[2, 7] = value
    if value != value:
        x.view(torch.int32)[2, 7] = 0x7F800001
    out = packed(name, torch.ones(40, 33))(x)
    assert torch.equal(out[[0, 1, 3]], torch.full((3, 40), 33.0))
    assert torch.equal(out[2].isnan(), torch.full((40,), value != value or name == "amx_int8"))
    assert not out[2].isfinite().any()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("inputs", [33, 48, 64])
def test_what_an_earlier_call_left_in_memory_is_not_read(name, inputs):
    """Inputs that fill up a tile are zero, not what lay there: zero times NaN is NaN."""
    wide, layer = packed(name, torch.ones(32, 64)), packed(name, torch.ones(32, inputs))
    wide(torch.full((40, 64), float("nan")))
    assert torch.equal(layer(torch.ones(40, inputs)), torch.full((40, 32), float(inputs)))


@pytest.mark.parametrize("name", [*KERNELS, "amx_int4"])
def test_no_rows_give_no_outputs(name):
    assert packed(name, torch.randn(16, 64))(torch.randn(0, 64)).shape == (0, 16)


def test_a_chip_without_tiles_is_told_what_it_lacks():
    """The reason names the instruction sets."""
    assert without(TILES, frozenset({"avx512f", "amx_tile"})) == "the processor has no amx_bf16, amx_int8, avx512_bf16"


def test_a_kernel_asked_for_by_name_refuses_where_its_instructions_would_end_the_process(monkeypatch):
    """The system asks to be asked before the registers are used."""
    monkeypatch.setattr("attn_kernels_cpu.library.without_tiles", lambda: "the system says no")
    with pytest.raises(KernelRefused, match=r"amx_bfloat16.*the system says no"):
        packed("amx_bfloat16", torch.randn(16, 32))
