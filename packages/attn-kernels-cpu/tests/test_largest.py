"""The largest output of each row, found without all outputs, against all outputs."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_core.models import FindsLargest
from attn_kernels_cpu.forms import FORMS
from attn_kernels_cpu.packed import PackedLinear

pytestmark = pytest.mark.usefixtures("_kernels")

SIZES = [(7, 64), (33, 96), (1000, 64), (2049, 32)]
"""Outputs and inputs: a part of a panel, parts of a pair, and more than are held at a time."""
ROWS = [1, 3, 5, 40]


@pytest.fixture(params=[name for name, form in FORMS.items() if not form.block])
def form(request):
    """A form that takes weights as floats; test_stored_blocks.py has those that come in blocks."""
    if FORMS[request.param].parts:
        request.getfixturevalue("_tiles")
    return request.param


def expected(outputs):
    return outputs.argmax(-1).where(outputs.amax(-1).isfinite(), -1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_it_is_the_first_of_the_largest_of_all_outputs(form, outputs, inputs, rows):
    torch.manual_seed(outputs + rows)
    layer = PackedLinear(form, torch.randn(outputs, inputs), torch.randn(outputs))
    assert isinstance(layer, FindsLargest)
    x = torch.randn(rows, inputs)
    assert torch.equal(layer.largest(x), expected(layer(x)))


@pytest.mark.parametrize("rows", [1, 17])
def test_of_equal_outputs_the_first_is_taken(form, rows):
    """Wherever they lie: in one panel, in two, in a share of another thread."""
    weight = torch.zeros(700, 64)
    x = torch.ones(rows, 64)
    layer = PackedLinear(form, weight, None)
    assert layer.largest(x).tolist() == [0] * rows
    for places in ([5, 9], [200, 217, 699], [31, 32, 600]):
        bias = torch.zeros(700)
        bias[places] = 2.0
        assert PackedLinear(form, weight, bias).largest(x).tolist() == places[:1] * rows


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 37, 699])
def test_a_row_with_outputs_that_are_no_numbers_has_none(form, bad, place):
    """The rows beside it have theirs."""
    torch.manual_seed(1)
    bias = torch.zeros(700)
    bias[place] = bad
    sick = PackedLinear(form, torch.randn(700, 64), bias)
    assert sick.largest(torch.randn(6, 64)).tolist() == [-1] * 6
    well = PackedLinear(form, torch.randn(700, 64), None)
    x = torch.randn(6, 64)
    found = well.largest(x)
    x[3, 5] = bad
    found[3] = -1
    assert torch.equal(well.largest(x), found)


def test_outputs_of_minus_infinity_are_never_the_largest_but_alone(form):
    bias = torch.full((40,), -torch.inf)
    weight, x = torch.zeros(40, 64), torch.ones(2, 64)
    assert PackedLinear(form, weight, bias).largest(x).tolist() == [-1, -1]
    bias[21] = -3e38
    assert PackedLinear(form, weight, bias).largest(x).tolist() == [21, 21]


def test_threads_and_company_change_nothing(form):
    torch.manual_seed(2)
    layer, x = PackedLinear(form, torch.randn(300, 64), None), torch.randn(23, 64)
    together = layer.largest(x)
    assert torch.equal(torch.cat([layer.largest(row[None]) for row in x]), together)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 16):
            torch.set_num_threads(count)
            assert torch.equal(layer.largest(x), together)
    finally:
        torch.set_num_threads(threads)


def test_rows_of_other_types_are_left_to_the_product_that_rounds_outputs(form):
    layer = PackedLinear(form, torch.randn(40, 64), None)
    assert layer.largest(torch.randn(2, 64, dtype=torch.bfloat16)) is None


def test_rows_may_have_any_leading_shape_or_be_none(form):
    layer, x = PackedLinear(form, torch.randn(40, 64), None), torch.randn(2, 3, 64)
    assert torch.equal(layer.largest(x), layer.largest(x.view(6, 64)).view(2, 3))
    assert layer.largest(torch.randn(0, 64)).shape == (0,)
    with pytest.raises(InvalidValue, match=r"rows: .*\[\.\.\., 64\] on the cpu"):
        layer.largest(torch.randn(2, 65))
