"""How far a number may be off that was kept in few bits, and how the bits lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attn_cache import KiviLayout
from attn_cache.integer_codes import pack_bits, unpack_bits
from attn_cache.quantization import Affine, Half, Quantizer, Symmetric
from attn_core import Field
from attn_core.errors import InvalidValue
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

NUMBERS = arrays(
    np.float32,
    array_shapes(min_dims=1, max_dims=3, max_side=9),
    elements=st.floats(-60000, 60000, width=32) | st.floats(-1, 1, width=32) | st.sampled_from([0.0, 1e-30, 100.0]),
)
ROUNDING = 1 + 2**-10
HALF = 2**-24
"""The smallest step of float16."""


def there_and_back(quantizer: Quantizer, numbers: torch.Tensor) -> torch.Tensor:
    return quantizer.decode(quantizer.encode(numbers), numbers.shape[-1], torch.float64)


@given(NUMBERS)
def test_cl_55_a_number_with_a_symmetric_code_is_off_by_at_most_half_its_scale(given_numbers):
    numbers = torch.from_numpy(given_numbers)
    back = there_and_back(Symmetric(), numbers)
    largest = numbers.abs().amax(-1, keepdim=True).double()
    assert ((back - numbers).abs() <= largest / 254 * ROUNDING + HALF).all()


@given(NUMBERS, st.sampled_from([2, 4, 8]), st.integers(1, 12))
def test_cl_55_a_number_with_an_affine_code_is_off_by_at_most_half_a_step_of_its_group(given_numbers, bits, group):
    numbers = torch.from_numpy(given_numbers)
    back = there_and_back(Affine(bits, group), numbers)
    for start in range(0, numbers.shape[-1], group):
        some = numbers[..., start : start + group].double()
        low, high = some.amin(-1, keepdim=True), some.amax(-1, keepdim=True)
        # The lowest number is rounded down to float16, which widens the range by one place of it.
        step = (high - low + low.abs() * 2**-10 + HALF) / (2**bits - 1) * ROUNDING + HALF
        off = (back[..., start : start + group] - some).abs()
        # A step below the smallest normal float16 is off by up to half its smallest one, in each of the codes.
        tiny = (2**bits - 1) * HALF / 2
        assert (off <= step / 2 * ROUNDING + tiny + some.abs().amax(-1, keepdim=True) * 2**-22).all()


@given(NUMBERS, st.sampled_from([Symmetric(), Affine(2, 4), Affine(4, 32)]))
def test_what_is_coded_again_is_off_no_further_than_rounding(given_numbers, quantizer):
    once = there_and_back(quantizer, torch.from_numpy(given_numbers))
    twice = there_and_back(quantizer, once.float())
    parts = quantizer.encode(once.float())
    step = parts["scale" if "scale" in parts else "step"].double().amax()
    assert ((twice - once).abs() <= step / 2 * ROUNDING + once.abs().max() * 2**-10).all()


@pytest.mark.parametrize("quantizer", [Half(), Symmetric(), Affine(2, 4), Affine(4, 32)])
@pytest.mark.parametrize("value", [0.0, 1.0, -7.25, 1e-30, 3e4])
def test_a_group_of_equal_numbers_comes_back_without_a_division_by_nothing(quantizer, value):
    numbers = torch.full((2, 8), value)
    back = there_and_back(quantizer, numbers)
    assert torch.allclose(back, numbers.double(), rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("quantizer", [Half(), Symmetric(), Affine(2, 4), Affine(4, 4)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_made_finite_and_harms_its_group_alone(quantizer, value):
    numbers = torch.ones(3, 4)
    numbers[1, 2] = value
    back = there_and_back(quantizer, numbers)
    assert not back[1, 2].isfinite()
    assert torch.allclose(back[[0, 2]], torch.ones(2, 4).double(), rtol=2**-10)


@given(arrays(np.uint8, array_shapes(max_dims=3, max_side=9)), st.sampled_from([2, 4, 8]))
def test_codes_lie_side_by_side_in_bytes_the_first_in_the_lowest_bits(given_codes, bits):
    codes = given_codes & (2**bits - 1)
    packed = pack_bits(torch.from_numpy(codes), bits)
    assert packed.shape[-1] == -(-codes.shape[-1] * bits // 8)
    assert torch.equal(unpack_bits(packed, bits, codes.shape[-1]), torch.from_numpy(codes))
    for row, written in zip(
        packed.reshape(-1, packed.shape[-1]).tolist(), codes.reshape(-1, codes.shape[-1]), strict=True
    ):
        whole = int.from_bytes(bytes(row), "little")
        assert [whole >> (bits * place) & (2**bits - 1) for place in range(len(written))] == written.tolist()


@settings(max_examples=30)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.integers(1, 3), st.integers(4, 40), st.booleans())
def test_the_parts_of_a_block_have_the_shapes_that_are_priced(bits, group, groups, size, keys):
    layout = KiviLayout(bits=bits, group=group, block=group * groups)
    name, field = ("rotary_key" if keys else "value"), Field((3, size))
    rows = torch.randn(2, layout.block, 3, size)
    parts = layout.encode(name, field, rows)
    priced = layout.parts(name, field)
    assert {part: (tuple(x.shape[1:]), str(x.dtype)) for part, x in parts.items()} == {
        part: (row.shape, f"torch.{row.dtype}") for part, row in priced.items()
    }
    assert layout.decode(name, field, parts, torch.float32).shape == rows.shape


def test_keys_of_one_large_channel_are_coded_better_by_channel_than_by_token():
    rows = torch.randn(1, 128, 2, 32, generator=torch.Generator().manual_seed(0))
    rows[..., 5] += 100
    layout = KiviLayout()
    off = {
        name: (layout.decode(name, Field((2, 32)), layout.encode(name, Field((2, 32)), rows), torch.float32) - rows)
        for name in ("key", "value")
    }
    assert off["key"].square().mean() < off["value"].square().mean() / 20


@pytest.mark.parametrize(
    ("given_layout", "field"),
    [({"bits": 3}, "bits"), ({"group": 0}, "group"), ({"block": 100}, "block"), ({"block": 0}, "block")],
)
def test_a_layout_that_cannot_be_is_refused(given_layout, field):
    with pytest.raises(InvalidValue, match=field):
        KiviLayout(**given_layout)
