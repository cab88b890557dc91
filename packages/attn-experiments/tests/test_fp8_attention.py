"""The rounding of attention in FP8: what rotations change, and how far the result is from attention in float64."""

from __future__ import annotations

import pytest
import torch
from attn_experiments import fp8_attention as fp8
from torch.nn.functional import scaled_dot_product_attention


def outliers(*shape: int, seed: int) -> torch.Tensor:
    return fp8.outliers(torch.Generator().manual_seed(seed), *shape)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("queries", "size"), [(300, 32), (130, 24), (1, 16)])
def test_attention_in_fp8_is_close_to_attention_in_float64(queries, size, rotated):
    rows = [outliers(2, queries, size, seed=seed) for seed in range(3)]
    seen = torch.ones(queries, queries, dtype=torch.bool).tril()
    found = fp8.attend(*rows, seen, fp8.Rounding(rotated=rotated))
    exact = scaled_dot_product_attention(*(part.double() for part in rows), is_causal=True)
    assert 0 < (found - exact).norm() < 0.08 * exact.norm()


def test_products_of_rotated_rows_are_what_they_were():
    one, other = (torch.randn(5, 60, dtype=torch.float64) for _ in range(2))
    matrix = fp8.rotation(60)
    torch.testing.assert_close(fp8.rotated(one, matrix) @ fp8.rotated(other, matrix).T, one @ other.T)


def test_cl_56_rotation_makes_errors_smaller_where_there_are_outliers_and_no_larger_where_not():
    seen = torch.ones(1024, 1024, dtype=torch.bool).tril()

    def gain(*rows: torch.Tensor) -> float:
        exact = scaled_dot_product_attention(*(part.double() for part in rows), is_causal=True)
        ways = fp8.Rounding(rotated=False, rows=None), fp8.SHIPPED
        before, after = ((fp8.attend(*rows, seen, way) - exact).square().mean().sqrt() for way in ways)
        return float(before / after)

    assert gain(*(outliers(1, 1024, 128, seed=seed) for seed in range(3))) > 1.4
    generator = torch.Generator().manual_seed(0)
    assert gain(*(torch.randn(1, 1024, 128, generator=generator) for _ in range(3))) > 0.97


def test_blocks_of_zeros_are_rounded_to_zeros():
    query, value = outliers(1, 40, 32, seed=1), outliers(1, 300, 32, seed=2)
    found = fp8.attend(query, torch.zeros(1, 300, 32), value, torch.ones(40, 300, dtype=torch.bool))
    torch.testing.assert_close(found, value.double().mean(1, keepdim=True).expand(1, 40, 32), rtol=0, atol=0.05)
