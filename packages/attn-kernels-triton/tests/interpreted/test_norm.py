"""Norms of rows, alone and of sums, and gates."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_kernels_triton.rowwise import rows as tiles
from attn_kernels_triton.rowwise.gate import gated
from attn_kernels_triton.rowwise.norm import rms_norm, rms_norm_sum
from rowwise_definitions import ACTIVATIONS, leaf, normed, require_right

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 8), (1, 5), (3, 17), (2, 5, 64), (9, 100)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few elements a tile and few programs, so that a small problem has several of each."""
    monkeypatch.setattr(tiles, "NORM_ELEMENTS", 256)
    monkeypatch.setattr("attn_kernels_triton.rowwise.norm.BACKWARD_WARPS", 12)
    monkeypatch.setattr(tiles, "GATE_ELEMENTS", 64)
    monkeypatch.setattr(tiles, "GATE_WIDTH", 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_and_all_their_gradients_are_those_of_the_definition(shape, dtype):
    leaves = [leaf(*shape, seed=1, dtype=dtype), leaf(shape[-1], seed=2, dtype=dtype)]
    require_right(lambda x, g: rms_norm(x, g, EPS), lambda x, g: normed(x, g, EPS), leaves, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_sums_give_the_sum_too_and_gradients_flow_through_both(dtype):
    leaves = [leaf(2, 5, 33, seed=1, dtype=dtype), leaf(2, 5, 33, seed=2, dtype=dtype), leaf(33, seed=3, dtype=dtype)]

    def plain(rows, added, gain):
        return rows + added, normed(rows + added, gain, EPS)

    # One rounding more: the sum is rounded before it is normed.
    require_right(lambda x, a, g: rms_norm_sum(x, a, g, EPS), plain, leaves, dtype, roundings=3)


@pytest.mark.parametrize("used", [slice(0, 2), slice(0, 1), slice(1, 2)], ids=str)
def test_what_is_added_in_a_narrower_type_is_read_as_it_is_and_gets_its_gradient_in_that_type(used):
    rows, gain = (leaf(*shape, seed=1).float().requires_grad_() for shape in ((2, 5, 33), (33,)))
    added = leaf(2, 5, 33, seed=2, dtype=torch.bfloat16).to(torch.bfloat16).requires_grad_()
    wide = added.detach().float().requires_grad_()
    found, same = rms_norm_sum(rows, added, gain, EPS), rms_norm_sum(rows, wide, gain, EPS)
    assert all(torch.equal(one, other) for one, other in zip(found, same, strict=True))
    assert found[0].dtype == found[1].dtype == torch.float32
    leaves = [(rows, added, gain), (rows, wide, gain)]
    ours, others = (
        torch.autograd.grad([out.sin().sum() for out in outs[used]], own, allow_unused=True)
        for outs, own in zip((found, same), leaves, strict=True)
    )
    for one, other, leaf_ in zip(ours, others, leaves[0], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == leaf_.dtype
            assert torch.equal(one, other.to(leaf_.dtype))


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_result_of_a_normed_sum_may_be_used(used):
    leaves = [leaf(4, 8, seed=1), leaf(4, 8, seed=2)]

    def plain(rows, added):
        return (rows + added, normed(rows + added, None, EPS))[used]

    require_right(lambda x, a: rms_norm_sum(x, a, None, EPS)[used], plain, leaves, torch.float32)


def test_a_gain_of_a_wider_type_than_its_rows_is_used_as_it_is():
    rows, gain = leaf(3, 40, seed=1, dtype=torch.bfloat16).bfloat16(), 1 + leaf(40, seed=2).float() / 512
    found = rms_norm(rows, gain.requires_grad_(), EPS)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.detach(), normed(rows.double(), gain.detach().double(), EPS).bfloat16())
    found.sum().backward()
    assert gain.grad is not None
    assert gain.grad.dtype == torch.float32


def test_outliers_do_not_lose_the_other_elements():
    rows = leaf(4, 64, seed=1)
    rows[:, 3] *= 1e4
    require_right(lambda x: rms_norm(x, None, EPS), lambda x: normed(x, None, EPS), [rows], torch.float32)


def test_rows_of_zeros_stay_zeros():
    rows = torch.zeros(3, 16, requires_grad=True)
    out = rms_norm(rows, torch.ones(16), EPS)
    out.sum().backward()
    assert not out.any()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_rows_that_lie_apart_in_memory_are_normed_like_others():
    wide = leaf(6, 40, seed=1).float()
    for rows in (wide[:, 3:20], wide[::2, :16], wide.view(3, 2, 40).transpose(0, 1)[..., :8]):
        torch.testing.assert_close(rms_norm(rows, None, EPS), normed(rows, None, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_and_their_gradients_are_those_of_the_definition(activation, dtype):
    for shape in SHAPES:
        leaves = [leaf(*shape, seed=1, dtype=dtype, scale=3), leaf(*shape, seed=2, dtype=dtype)]
        require_right(
            lambda gate, up: gated(gate, up, activation),
            lambda gate, up: ACTIVATIONS[activation](gate) * up,
            leaves,
            dtype,
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_far_from_zero_neither_overflow_nor_vanish(activation):
    gate = torch.tensor([[-1e4, -90.0, -1e-6, 0.0, 1e-6, 90.0, 1e4, 5.0]], requires_grad=True)
    out = gated(gate, torch.ones_like(gate), activation)
    torch.testing.assert_close(out, ACTIVATIONS[activation](gate), rtol=1e-5, atol=1e-6)
    out.sum().backward()
    assert gate.grad is not None
    assert gate.grad.isfinite().all()


def test_halves_of_one_projection_are_gates_and_what_they_let_through():
    both = leaf(2, 5, 36, seed=1).float().requires_grad_()
    gate, up = both.chunk(2, -1)
    found = torch.autograd.grad(gated(gate, up, "silu").square().sum(), both)
    plain = torch.autograd.grad((ACTIVATIONS["silu"](gate) * up).square().sum(), both)
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: rms_norm(torch.zeros(2, 8, dtype=torch.float64), None, EPS), "rows.dtype"),
        (lambda: rms_norm(torch.zeros(8, 2).T, None, EPS), "rows.stride"),
        (lambda: rms_norm(torch.zeros(1, 2**13 + 1), None, EPS), "rows"),
        (lambda: rms_norm(torch.zeros(2, 0), None, EPS), "rows"),
        (lambda: rms_norm(torch.zeros(2, 8), torch.ones(7), EPS), "gain"),
        (lambda: rms_norm(torch.zeros(2, 8), torch.ones(8, dtype=torch.int64), EPS), "gain.dtype"),
        (lambda: rms_norm(torch.zeros(1, 8).expand(2**31, 8), None, EPS), "rows: rows"),
        (lambda: rms_norm_sum(torch.zeros(2, 8), torch.zeros(2, 7), None, EPS), "added"),
        (lambda: rms_norm_sum(torch.zeros(2, 8).half(), torch.zeros(2, 8), None, EPS), "added.dtype"),
        (lambda: gated(torch.zeros(2, 8), torch.zeros(3, 8), "silu"), "up"),
        (lambda: gated(torch.zeros(2, 8), torch.zeros(2, 8), "tanh"), "activation"),
    ],
)
def test_rows_that_programs_would_misread_are_refused_by_name(call, named):
    with pytest.raises(InvalidValue) as refused:
        call()
    assert refused.value.metadata["field"] == named
