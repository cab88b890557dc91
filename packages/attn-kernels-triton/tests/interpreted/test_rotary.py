from __future__ import annotations

import pytest
import torch
from attn_core import Rotary
from attn_core.errors import InvalidValue
from attn_kernels_triton.rowwise import rows as tiles
from attn_kernels_triton.rowwise.rotary import rotate
from attn_variants.compute.rotary import CosSin, cos_sin_of
from bounds import require_close
from rowwise_definitions import leaf, require_right, turned

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 2, 8), (1, 1, 2), (2, 5, 3, 12), (1, 7, 9, 20), (9, 5, 16)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few pairs a tile, so that a small problem has several."""
    monkeypatch.setattr(tiles, "ROTARY_PAIRS", 32)
    monkeypatch.setattr("attn_kernels_triton.rowwise.rotary.ROTARY_PAIRS", 32)


def cos_sin_of_batch(tokens: int, turned: int, *, interleaved: bool, first: int = 100) -> CosSin:
    return cos_sin_of(Rotary(interleaved=interleaved), turned, torch.arange(first, first + tokens), torch.float32)


def angles_of(tokens: int, turned: int) -> torch.Tensor:
    frequencies = torch.tensor(Rotary().frequencies(turned), dtype=torch.float64)
    return torch.arange(100, 100 + tokens, dtype=torch.float64)[:, None] * frequencies


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_turn_as_complex_numbers_do_and_gradients_turn_back(shape, interleaved, dtype):
    cos_sin = cos_sin_of_batch(shape[-3], shape[-1], interleaved=interleaved)
    angles = angles_of(shape[-3], shape[-1])
    require_right(
        lambda rows: rotate(rows, *cos_sin, interleaved=interleaved),
        lambda rows: turned(rows, angles, interleaved=interleaved),
        [leaf(*shape, seed=1, dtype=dtype)],
        dtype,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("part", [2, 6, 16])
def test_what_stands_behind_the_turned_part_of_a_head_stays_bit_for_bit(part, interleaved):
    rows = leaf(4, 3, 22, seed=1, dtype=torch.bfloat16).bfloat16().requires_grad_()
    found = rotate(rows, *cos_sin_of_batch(4, part, interleaved=interleaved), interleaved=interleaved)
    assert torch.equal(found[..., part:], rows[..., part:])
    exact = turned(rows.detach().double(), angles_of(4, part), interleaved=interleaved)
    require_close(found.detach(), exact.bfloat16(), exact, "turned part")
    (change,) = torch.autograd.grad(found[..., part:].sum(), rows)
    assert torch.equal(change[..., part:], torch.ones_like(change[..., part:]))
    assert not change[..., :part].any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_lengths_of_pairs_do_not_change(interleaved):
    rows = leaf(6, 2, 16, seed=1).float()
    found = rotate(rows, *cos_sin_of_batch(6, 16, interleaved=interleaved), interleaved=interleaved)
    torch.testing.assert_close(found.norm(dim=-1), rows.norm(dim=-1))


def test_every_sequence_may_have_angles_of_its_own():
    rows = leaf(2, 3, 2, 8, seed=1).float()
    each = [cos_sin_of_batch(3, 8, interleaved=False, first=first) for first in (0, 50)]
    both = CosSin(*(torch.stack(pair) for pair in zip(*each, strict=True)))
    apart = torch.stack([rotate(row, *cos_sin, interleaved=False) for row, cos_sin in zip(rows, each, strict=True)])
    assert torch.equal(rotate(rows, *both, interleaved=False), apart)


def test_heads_that_lie_apart_in_memory_are_turned_like_others():
    joint = leaf(2, 5, 3 * 4 * 8, seed=1).float()
    cos_sin = cos_sin_of_batch(5, 8, interleaved=False)
    for start in (0, 32, 64):
        rows = joint[..., start : start + 32].unflatten(-1, (4, 8))
        assert torch.equal(rotate(rows, *cos_sin, interleaved=False), rotate(rows.clone(), *cos_sin, interleaved=False))


def test_gradients_of_any_strides_are_turned_back():
    rows = leaf(5, 2, 8, seed=1).float().requires_grad_()
    found = rotate(rows, *cos_sin_of_batch(5, 8, interleaved=True), interleaved=True)
    change = leaf(8, 5, 2, seed=2).float().permute(1, 2, 0)
    expected = torch.autograd.grad(found, rows, change.contiguous(), retain_graph=True)
    assert torch.equal(torch.autograd.grad(found, rows, change)[0], expected[0])


TURN = cos_sin_of_batch(4, 8, interleaved=False)


@pytest.mark.parametrize(
    ("rows", "cos_sin", "named"),
    [
        (torch.zeros(4, 2, 8, dtype=torch.float64), TURN, "rows.dtype"),
        (torch.zeros(4, 8), TURN, "rows"),
        (torch.zeros(8, 4, 2).permute(1, 2, 0), TURN, "rows.stride"),
        (torch.zeros(5, 2, 8), TURN, "cosines"),
        (torch.zeros(4, 2, 6), TURN, "cosines"),
        (torch.zeros(4, 2, 8), CosSin(TURN.cosines, TURN.sines[..., :6]), "sines"),
        (torch.zeros(4, 2, 8), CosSin(TURN.cosines.double(), TURN.sines), "cosines"),
        (torch.zeros(4, 2, 8), CosSin(TURN.cosines.clone().requires_grad_(), TURN.sines), "cosines.requires_grad"),
        (torch.zeros(1, 1, 8).expand(2**31, 1, 8), TURN, "rows: rows"),
    ],
)
def test_rows_and_angles_that_programs_would_misread_are_refused_by_name(rows, cos_sin, named):
    with pytest.raises(InvalidValue) as refused:
        rotate(rows, *cos_sin, interleaved=False)
    assert refused.value.metadata["field"] == named
