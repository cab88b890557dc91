from __future__ import annotations

import dataclasses

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Mask, Window
from attn_core.distributions import SoftmaxWithSink
from attn_core.errors import InvalidValue
from attn_core.masking import seen_pairs
from attn_core.masks import Segments
from attn_core.scores import ScaledDot
from attn_kernels_triton import fp8_reference as plain
from attn_kernels_triton.fp8 import attend, rotation
from attn_testing import oracle
from calls import Call, wide

HALF, BRAIN = torch.float16, torch.bfloat16


def outliers(*shape: int, seed: int) -> torch.Tensor:
    """N(0, 1) + N(0, 100) · Bernoulli(0.001), the law of Shah et al. 2024, section 4.3."""
    generator = torch.Generator().manual_seed(seed)
    usual, far, which = (draw(*shape, generator=generator) for draw in (torch.randn, torch.randn, torch.rand))
    return usual + 10 * far * (which < 0.001)


def inputs(mask: Mask, queries: int, keys: int, *, size: int = 32, dtype: torch.dtype = HALF):
    heads = Heads(query=2, key_value=1, key_size=size, value_size=size)
    operands = AttentionInputs(
        query=outliers(1, queries, 2, size, seed=1).to(dtype),
        key=outliers(1, keys, 1, size, seed=2).to(dtype),
        value=outliers(1, keys, 1, size, seed=3).to(dtype),
    )
    return AttentionSpec(heads=heads, mask=mask), operands


def by_plain(spec: AttentionSpec, operands: AttentionInputs, rounding: plain.Rounding) -> torch.Tensor:
    query, key, value = (rows[0].transpose(0, 1) for rows in (operands.query, operands.key, operands.value))
    queries, keys = query.shape[1], key.shape[1]
    seen = seen_pairs(spec.mask, torch.arange(keys - queries, keys)[None], torch.arange(keys)[None], None)[0, 0]
    out = plain.attend(query, key.repeat(2, 1, 1), value.repeat(2, 1, 1), seen, rounding)
    return out.transpose(0, 1)[None]


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(
    ("mask", "queries", "keys", "size"),
    [(Full(), 33, 70, 32), (Causal(), 70, 140, 32), (Window(left=20, right=3), 130, 150, 24), (Full(), 1, 1, 16)],
    ids=["full", "causal", "window of a size that is no power of two", "one of each"],
)
def test_codes_are_met_as_plain_torch_meets_them(mask, queries, keys, size, rotated):
    spec, operands = inputs(mask, queries, keys, size=size)
    found = attend(spec, operands, rotated=rotated).double()
    expected = by_plain(spec, operands, plain.Rounding(rotated=rotated))
    exact = oracle.attend(spec, wide(operands))
    # Tiles are smaller here than in plain torch: what is the highest logit so far, rounds weights another way.
    assert (found - expected).norm() <= 0.5 * (expected - exact).norm() + 2e-3 * exact.norm()
    assert (found - exact).norm() <= 1.2 * (expected - exact).norm() + 2e-3 * exact.norm()


def test_products_of_rotated_rows_are_what_they_were():
    one, other = (torch.randn(5, 64, dtype=torch.float64) for _ in range(2))
    turn = rotation(64, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(plain.rotated(one, turn) @ plain.rotated(other, turn).T, one @ other.T)


def test_rotation_makes_errors_smaller_where_there_are_outliers_and_no_larger_where_not():
    seen = torch.ones(1024, 1024, dtype=torch.bool).tril()

    def gain(*rows: torch.Tensor) -> float:
        exact = torch.nn.functional.scaled_dot_product_attention(*(part.double() for part in rows), is_causal=True)
        ways = plain.Rounding(rotated=False, rows=None), plain.SHIPPED
        before, after = ((plain.attend(*rows, seen, way) - exact).square().mean().sqrt() for way in ways)
        return float(before / after)

    assert gain(*(outliers(1, 1024, 128, seed=seed) for seed in range(3))) > 1.4
    generator = torch.Generator().manual_seed(0)
    assert gain(*(torch.randn(1, 1024, 128, generator=generator) for _ in range(3))) > 0.97


def test_sinks_take_their_share_of_codes_too():
    call = Call(Causal(), 33, 70, dtype=BRAIN, sizes=(32, 32), distribution=SoftmaxWithSink())
    operands = call.operands()
    exact = oracle.attend(call.spec, wide(operands))
    assert (attend(call.spec, operands).double() - exact).norm() < 0.08 * exact.norm()


def test_blocks_of_zeros_are_met_too():
    spec, operands = inputs(Full(), 40, 300)
    none = dataclasses.replace(operands, key=torch.zeros_like(operands.key))
    mean = operands.value.double().mean(1, keepdim=True).expand(1, 40, 2, 32)
    assert (attend(spec, none).double() - mean).abs().max() < 0.05 * operands.value.abs().max()


def test_of_no_keys_nothing_comes():
    spec, operands = inputs(Full(), 4, 1)
    nothing = dataclasses.replace(operands, key=operands.key[:, :0], value=operands.value[:, :0])
    assert not attend(spec, nothing).any()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float32}, "query.dtype"),
        ({"mask": Causal() & Segments((3, 2))}, "mask"),
        ({"mask": Window(left=4, dilation=2)}, "mask"),
    ],
)
def test_what_cannot_be_rounded_is_refused(change, said):
    spec, operands = inputs(**{"mask": Full(), "queries": 5, "keys": 5, **change})
    with pytest.raises(InvalidValue, match=rf"^{said}"):
        attend(spec, operands)


def test_logits_that_fall_where_products_rise_are_refused():
    spec, operands = inputs(Full(), 5, 5)
    with pytest.raises(InvalidValue, match=r"^score\.scale"):
        attend(dataclasses.replace(spec, score=ScaledDot(scale=-0.1)), operands)


def test_padded_keys_are_refused():
    spec, operands = inputs(Full(), 5, 5)
    with pytest.raises(InvalidValue, match=r"^mask"):
        attend(spec, dataclasses.replace(operands, key_padding_mask=torch.ones(1, 5, dtype=torch.bool)))
