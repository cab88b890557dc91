"""CL-13: how often attention touches slow memory, counted while FlashAttention's own two algorithms run."""

from __future__ import annotations

import math

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_experiments.flash_attention import Tiles, flash_attention, standard_attention
from torch.nn.functional import scaled_dot_product_attention


def counted(length: int, size: int, fast: int | None) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Numbers read and written, the output, and that of torch."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, length, size, dtype=torch.float64)
    run = standard_attention(query, key, value) if fast is None else flash_attention(query, key, value, fast)
    return run.touched, run.out, scaled_dot_product_attention(query[None], key[None], value[None])[0]


@pytest.mark.parametrize(
    ("length", "size", "fast"), [(64, 8, None), (64, 8, 256), (60, 8, 200), (50, 4, 64), (1, 3, 12)]
)
def test_cl_13_both_algorithms_give_attention_and_touch_what_the_paper_counts(
    length: int, size: int, fast: int | None
) -> None:
    touched, found, expected = counted(length, size, fast)
    assert torch.allclose(found, expected, rtol=0, atol=1e-13)
    if fast is None:
        assert touched == 4 * length * size + 4 * length**2
    else:
        passes = math.ceil(length / math.ceil(fast / (4 * size)))
        assert touched == 2 * length * size + passes * (3 * length * size + 4 * length)


def test_cl_13_tiles_touch_less_where_a_head_is_small_beside_the_fast_memory() -> None:
    """Θ(n²d²/M) against Θ(nd + n²): less where d² is well below M, and more where it is not."""
    touched = {fast: counted(256, 8, fast)[0] for fast in (512, 1024, 2048)}
    assert max(touched.values()) < counted(256, 8, None)[0]
    assert touched[512] / touched[1024] == pytest.approx(2, abs=0.1)
    assert touched[1024] / touched[2048] == pytest.approx(2, abs=0.15)
    assert counted(512, 8, 1024)[0] / touched[1024] == pytest.approx(4, abs=0.15)
    assert counted(256, 8, 64)[0] > counted(256, 8, None)[0]


def test_scores_that_overflow_do_not_where_the_largest_is_taken_off() -> None:
    query = torch.full((4, 2), 1e200, dtype=torch.float64)
    key, value = torch.full((4, 2), 1e100, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    out = flash_attention(query, key, value, 16).out
    torch.testing.assert_close(out, value.mean(0).expand(4, 2), rtol=0, atol=1e-15)


def test_a_fast_memory_that_holds_no_tile_is_refused() -> None:
    assert Tiles.of(33, 8) == Tiles(columns=2, rows=2)
    with pytest.raises(InvalidValue, match="at least 4 d = 32"):
        Tiles.of(31, 8)
