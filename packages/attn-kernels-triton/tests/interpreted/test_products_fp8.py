"""Linear layers with weights in e4m3, and with rows in it too, beside float64 of the very roundings."""

from __future__ import annotations

import math

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_kernels_triton import products
from attn_kernels_triton.products import CodedLinear
from attn_kernels_triton.products_fp8 import (
    GROUP,
    Rounded,
    RoundedRowsLinear,
    fp8_weights,
    round_launch,
    rounded,
)
from meanings import E4M3, meaning, require_product

NUMBERS, _ORDER = torch.sort(E4M3[E4M3.isfinite()])
"""All numbers of e4m3 in order; zero is there twice."""
FORMS = ["fp8", "fp8_channel", "fp8_block"]
CASES = [
    (torch.bfloat16, (1, 128, 64)),
    (torch.bfloat16, (17, 256, 5)),
    (torch.float32, (3, 384, 70)),
    (torch.float16, (65, 256, 129)),
]
"""Rows, inputs and outputs: of a whole tile, of parts of one, and of several."""
NO_NUMBERS = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
"""What numpy says of arithmetic with NaN and infinity, which is asked for."""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers N(0, 1), the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def weights_of(form: str, outputs: int, inputs: int) -> torch.Tensor:
    """Floats, or bytes with any codes but NaN and small scales of their own."""
    if form == "fp8":
        return normal(outputs, inputs)
    generator = torch.Generator().manual_seed(outputs)
    codes = torch.randint(0, 256, (outputs, inputs), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 1
    apart = codes.view(outputs, -1, inputs if form == "fp8_channel" else GROUP)
    scales = torch.rand(outputs, apart.shape[1], 1, generator=generator) * 1e-3 + 1e-4
    return torch.cat([scales.view(torch.uint8), apart], -1).flatten(1)


def layer_of(kind: type[CodedLinear], form: str, outputs: int, inputs: int, *, biased: bool = False) -> CodedLinear:
    bias = normal(outputs) if biased else None
    return kind(fp8_weights(form, weights_of(form, outputs, inputs), bias), form)


def nearest(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of e4m3, of two as near the one whose code is even; none is beyond 448."""
    low = torch.searchsorted(NUMBERS, numbers.double(), right=True).clamp(1, len(NUMBERS) - 1) - 1
    below, above = NUMBERS[low], NUMBERS[low + 1]
    to_below, to_above = numbers - below, above - numbers
    even = (torch.searchsorted(E4M3[:127].contiguous(), below.abs()) % 2) == 0
    return torch.where((to_below < to_above) | ((to_below == to_above) & even), below, above)


def rows_as_rounded(rows: torch.Tensor, group: int | None) -> torch.Tensor:
    """What rows become by a loop over rows and groups, in float64; the scale and the quotient are float32."""
    out = torch.zeros(rows.shape, dtype=torch.float64)
    for row in range(len(rows)):
        for part in range(0, rows.shape[1], group or rows.shape[1]):
            numbers = rows[row, part : part + (group or rows.shape[1])].float()
            scale = numbers.abs().max() / 448
            if scale > 0:
                out[row, part : part + len(numbers)] = nearest((numbers / scale).double()) * scale.double()
    return out


def run(rows: torch.Tensor, group: int | None) -> Rounded:
    """The program that rounds."""
    groups = 1 if group is None else -(-rows.shape[1] // group)
    codes = torch.zeros(rows.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    into = Rounded(codes, torch.empty(len(rows), groups))
    round_launch(rows, into, group).run(rows.device)
    return into


@pytest.mark.parametrize("known", [True, False], ids=["as chips with e4m3", "as chips without"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_a_product_with_weights_alone_in_fp8_is_that_of_the_numbers_that_codes_mean(
    form, dtype, shape, known, monkeypatch
):
    monkeypatch.setattr(products, "has_e4m3", lambda _: known)
    rows, inputs, outputs = shape
    require_product(
        layer_of(CodedLinear, form, outputs, inputs, biased=bool(outputs % 2)), normal(rows, inputs, dtype=dtype)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_a_product_of_rounded_rows_is_that_of_what_they_are_rounded_to(form, dtype, shape):
    rows, inputs, outputs = shape
    layer = layer_of(RoundedRowsLinear, form, outputs, inputs, biased=bool(outputs % 2))
    given = normal(rows, inputs, dtype=dtype)
    taken, weights = rows_as_rounded(given, layer.group), meaning(layer)
    bias = torch.zeros(outputs) if layer.bias is None else layer.bias
    exact = taken @ weights.T + bias.double()
    slack = 2.0**-20 * (taken.abs() @ weights.abs().T) + 0.51 * torch.finfo(dtype).eps * exact.abs()
    assert ((layer(given).double() - exact).abs() <= slack).all()


@pytest.mark.parametrize("group", [None, GROUP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("inputs", [1, 100, 300, 5000])
def test_rows_become_the_nearest_numbers_of_e4m3_by_the_program_and_in_torch_to_the_bit(inputs, dtype, group):
    rows = normal(3, inputs, dtype=dtype)
    rows[1] *= 100 * normal(1, inputs, dtype=dtype)[0] ** 2  # some stand out
    found, plain = run(rows, group), rounded(rows, group)
    assert torch.equal(found.codes.view(torch.uint8), plain.codes.view(torch.uint8))
    assert torch.equal(found.scales, plain.scales)
    scales = found.scales.double().repeat_interleave(group or inputs, 1)[:, :inputs]
    assert torch.equal(E4M3[found.codes.view(torch.uint8).int()] * scales, rows_as_rounded(rows, group))


@pytest.mark.parametrize("group", [None, GROUP])
def test_numbers_between_two_of_e4m3_small_ones_too_go_to_the_even_one(group):
    between = (NUMBERS[:-1] + NUMBERS[1:]) / 2
    rows = torch.cat([between, torch.tensor([448.0])])[-GROUP:].float()[None]  # a scale of one
    found = run(rows, group)
    assert found.scales.tolist() == [[1.0]]
    assert torch.equal(E4M3[found.codes.view(torch.uint8).int()], nearest(rows.double()))


@NO_NUMBERS
@pytest.mark.parametrize("form", ["fp8", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_zeros_of_the_largest_of_the_smallest_and_of_no_numbers_are_what_they_are(form, dtype):
    layer = layer_of(RoundedRowsLinear, form, 20, 256, biased=True)
    weights, bias = meaning(layer), layer.bias.double()
    rows = normal(7, 256, dtype=dtype)
    rows[1], rows[2], rows[3, 9] = 0.0, rows[2] / rows[2].abs().max() * 1e-30, torch.finfo(dtype).max / 8
    rows[4, 3], rows[5, 40] = math.nan, math.inf
    found = layer(rows).double()
    assert torch.equal(found[1], layer.bias.to(dtype).double())
    assert ((found[2] - bias).abs() <= torch.finfo(dtype).eps * bias.abs()).all()
    exact = rows_as_rounded(rows[3:4], layer.group)[0] @ weights.T + bias
    assert ((found[3] - exact).abs() <= 4 * torch.finfo(dtype).eps * exact.abs()).all()
    assert found[4].isnan().all()
    expected = torch.where(weights[:, 40] > 0, math.inf, -math.inf)
    assert torch.equal(found[5][weights[:, 40] != 0], expected[weights[:, 40] != 0])
    assert found[[0, 6]].isfinite().all()
    assert torch.equal(layer(rows[[0, 6]]).double(), found[[0, 6]])


def test_outliers_of_a_row_coarsen_its_small_numbers_by_no_more_than_subnormals_do():
    rows = normal(4, 512)
    rows[:, 7] = 1000.0
    error = (rows_as_rounded(rows, None) - rows.double()).abs()
    found = run(rows, None)
    taken = E4M3[found.codes.view(torch.uint8).int()] * found.scales.double()
    assert torch.equal((taken - rows.double()).abs(), error)
    assert (error <= torch.maximum(rows.abs().double() / 16, found.scales.double() * 2.0**-10)).all()


@pytest.fixture
def shared(monkeypatch):
    """Shares of a few turns, as of long rows on a large chip."""
    monkeypatch.setattr(products, "FEWEST_TURNS", 1)
    monkeypatch.setattr(products, "processors", lambda _: 3)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [CodedLinear, RoundedRowsLinear])
def test_a_row_alone_has_the_bits_that_it_has_in_a_crowd_of_any_size(kind, form, programs):
    layer, rows = layer_of(kind, form, 70, 512, biased=True), normal(65, 512, dtype=torch.bfloat16)
    rows[5] *= 1000  # a large neighbour must not coarsen others
    crowds = [layer(rows[:count])[:3] for count in (3, 17, 65)]
    assert all(torch.equal(crowd, crowds[0]) for crowd in crowds)
    assert torch.equal(layer(rows[2:3])[0], crowds[0][2])
    first = {CodedLinear: [], RoundedRowsLinear: ["round_groups" if layer.group else "round_rows"]}[kind]
    decoded = [*first, "multiply_codes", "add_parts"]
    assert programs == [*decoded * 2, *first, "multiply_codes", *decoded]


@pytest.mark.parametrize("kind", [CodedLinear, RoundedRowsLinear])
def test_rows_may_lie_apart_be_of_any_axes_or_none_at_all(kind):
    layer = layer_of(kind, "fp8", 40, 96)
    wide = normal(5, 200, dtype=torch.bfloat16)
    assert torch.equal(layer(wide[::2, 3:99]), layer(wide[::2, 3:99].contiguous()))
    turned = normal(96, 5, dtype=torch.bfloat16).T
    assert torch.equal(layer(turned.reshape(1, 5, 96))[0], layer(turned))
    assert layer(wide[:0, :96]).shape == (0, 40)


def test_a_weight_is_a_sixteenth_of_itself_off_at_most_and_zeros_stay_zeros():
    weight = normal(9, 100)
    weight[1], weight[2], weight[3, 5], weight[4] = 0.0, weight[2] * 1e-30, 30.0, weight[4].sign() * 3e38
    layer = CodedLinear(fp8_weights("fp8", weight, None), "fp8")
    found, steps = meaning(layer), layer.steps.double()[:, None]
    # Below the smallest normal number, 2^-6, numbers are 2^-9 apart.
    assert (
        (found - weight.double()).abs() <= torch.maximum(weight.abs().double() / 16, 2.0**-10 * steps) + 1e-45
    ).all()
    assert (found[1] == 0).all()
    assert torch.allclose(found[:, :1].sign(), weight[:, :1].double().sign())


@NO_NUMBERS
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", [CodedLinear, RoundedRowsLinear])
def test_a_weight_that_is_no_number_makes_none_of_its_own_output(kind, known, monkeypatch):
    monkeypatch.setattr(products, "has_e4m3", lambda _: known)
    weight = normal(6, 64)
    weight[2, 3], weight[4, 5] = math.nan, math.inf
    out = kind(fp8_weights("fp8", weight, None), "fp8")(normal(3, 64))
    assert not out[:, [2, 4]].isfinite().any()
    assert out[:, [0, 1, 3, 5]].isfinite().all()


@pytest.mark.parametrize("form", ["fp8_channel", "fp8_block"])
def test_no_bit_of_a_stored_weight_is_lost(form):
    raw = weights_of(form, 5, 256)
    raw[1, :4] = torch.tensor([3.0e-40]).view(torch.uint8)  # a scale may be subnormal
    size = 256 if form == "fp8_channel" else GROUP
    apart = raw.view(5, -1, 4 + size)
    expected = torch.stack(
        [
            torch.cat([E4M3[block[4:].int()] * float(block[:4].clone().view(torch.float32)) for block in row])
            for row in apart
        ]
    )
    assert torch.equal(meaning(CodedLinear(fp8_weights(form, raw, None), form)), expected)


@pytest.mark.parametrize("form", ["fp8_channel", "fp8_block"])
def test_bytes_that_are_no_whole_blocks_are_refused(form):
    raw = weights_of(form, 3, 128)
    cut = raw[:, :3] if form == "fp8_channel" else raw[:, :-1]
    for damaged in (cut, raw.to(torch.int16), raw[0]):
        with pytest.raises(InvalidValue, match=f"the layout of {form}"):
            fp8_weights(form, damaged, None)


def test_rows_that_programs_would_misread_are_refused_by_name():
    layer = layer_of(RoundedRowsLinear, "fp8", 4, 32)
    for rows in (normal(2, 31), normal(2, 32, dtype=torch.float64), normal(2, 32).to("meta")):
        with pytest.raises(InvalidValue, match="rows"):
            layer(rows)
