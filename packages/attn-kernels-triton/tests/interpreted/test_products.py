"""Linear layers with weights of few bits: what their programs compute, beside the weights that their codes mean."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_kernels_triton import products
from attn_kernels_triton.products import int4_linear, int8_linear
from meanings import meaning, require_product

MAKERS = {"int8": int8_linear, "int4": int4_linear}
CASES = [
    (torch.bfloat16, (1, 32, 64)),
    (torch.bfloat16, (17, 129, 5)),
    (torch.bfloat16, (40, 64, 130)),
    (torch.float32, (3, 300, 70)),
    (torch.float16, (65, 257, 129)),
]
"""Rows, inputs and outputs: of a whole tile, of parts of one, and of several."""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers N(0, 1), the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.fixture
def shared(monkeypatch):
    """Shares of a few turns, as of long rows on a large chip."""
    monkeypatch.setattr(products, "FEWEST_TURNS", 1)
    monkeypatch.setattr(products, "processors", lambda _: 3)


@pytest.mark.parametrize("form", MAKERS)
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_a_product_is_that_of_the_weights_that_the_codes_mean(form, dtype, shape):
    rows, inputs, outputs = shape
    bias = normal(outputs) if outputs % 2 else None
    require_product(MAKERS[form](normal(outputs, inputs), bias), normal(rows, inputs, dtype=dtype))


@pytest.mark.parametrize("form", MAKERS)
def test_a_row_alone_has_the_bits_that_it_has_in_a_crowd_of_any_size(form, shared, programs):
    layer, rows = MAKERS[form](normal(70, 400), normal(70)), normal(65, 400, dtype=torch.bfloat16)
    require_product(layer, rows[:3])
    assert programs == ["multiply_codes", "add_parts"]
    crowds = [layer(rows[:count])[:3] for count in (3, 17, 65)]
    assert programs[2:] == ["multiply_codes", "add_parts"] * 2 + ["multiply_codes"]
    assert all(torch.equal(crowd, crowds[0]) for crowd in crowds)
    assert torch.equal(layer(rows[2:3])[0], crowds[0][2])


@pytest.mark.parametrize("form", MAKERS)
def test_rows_may_lie_apart_be_of_any_axes_or_none_at_all(form):
    layer = MAKERS[form](normal(40, 96), None)
    wide = normal(5, 200, dtype=torch.bfloat16)
    assert torch.equal(layer(wide[::2, 3:99]), layer(wide[::2, 3:99].contiguous()))
    turned = normal(96, 5, dtype=torch.bfloat16).T
    assert torch.equal(layer(turned), layer(turned.contiguous()))
    assert torch.equal(layer(turned.reshape(1, 5, 96))[0], layer(turned))
    assert layer(wide[:0, :96]).shape == (0, 40)


@pytest.mark.parametrize("form", MAKERS)
def test_no_weight_is_farther_from_its_code_than_half_a_step(form):
    weight = normal(7, 100)
    weight[1] = 0.0
    weight[2] *= 1e-4
    weight[3, 5] = 30.0
    layer = MAKERS[form](weight, None)
    if layer.group:
        steps = layer.steps.double().repeat_interleave(layer.group, 1)[:, :100]
        # Steps and least values are half floats.
        slack = 2.0**-11 * (weight.abs().double() + 16 * steps) + 2.0**-24
    else:
        steps, slack = layer.steps.double()[:, None], 1e-6 * weight.abs().double()
    assert ((meaning(layer) - weight.double()).abs() <= 0.5 * steps + slack).all()
    assert (meaning(layer)[1] == 0).all()


def test_rows_that_programs_would_misread_are_refused_by_name():
    layer = int8_linear(normal(4, 32), None)
    for rows in (normal(2, 31), normal(2, 32, dtype=torch.float64), normal(2, 32).to("meta")):
        with pytest.raises(InvalidValue, match="rows"):
            layer(rows)
