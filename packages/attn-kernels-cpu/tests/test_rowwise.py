"""Row-wise kernels of training give the numbers and gradients of their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from attn_core.kernels.rowwise import RotaryProblem, Targets
from attn_kernels_cpu import rowwise
from attn_kernels_cpu.training import CpuRotary
from torch.nn import functional

EPS = 1e-6
SHAPES = [(1, 3), (3, 5), (2, 7, 40), (130, 48), (0, 16)]
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
}


def with_gradients(compute, operands):
    """The results of `compute`, and the gradients of its operands for a sum of the results with fixed factors."""
    leaves = [part.detach().clone().requires_grad_() for part in operands]
    found = compute(*leaves)
    outs = found if isinstance(found, (tuple, list)) else [found]
    torch.manual_seed(5)
    factors = [torch.randn(out.shape) for out in outs]
    total = sum((out * factor.to(out.dtype)).sum() for out, factor in zip(outs, factors, strict=True))
    return [out.detach() for out in outs] + list(torch.autograd.grad(total, leaves))


def require_right(compute, defined, operands, bound=1e-5):
    """Results and gradients are those of the definition in float64, to a share of the largest number of each."""
    found = with_gradients(compute, operands)
    wanted = with_gradients(defined, [part.double() for part in operands])
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == other.shape
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound * largest)


def rms(rows, gain):
    return rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def turned(rows, cosines, sines):
    """Each pair of element i and i + half as a complex number times that of its angle; the rest is kept."""
    size = cosines.shape[-1]
    half = size // 2
    pairs = torch.complex(rows[..., :half], rows[..., half:size])
    by = pairs * torch.complex(cosines[..., :half], sines[..., half:]).to(pairs.dtype)
    return torch.cat([by.real, by.imag, rows[..., size:]], -1)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_of_rows_and_of_sums_and_their_gradients(shape):
    torch.manual_seed(1)
    rows, added, gain = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    require_right(lambda x, g: rowwise.norm(x, g, EPS), rms, [rows, gain])
    require_right(
        lambda x, y, g: rowwise.norm_sum(x, y, g, EPS), lambda x, y, g: (x + y, rms(x + y, g)), [rows, added, gain]
    )
    # Of a sum that alone is used, and of a norm that alone is used.
    require_right(lambda x, y: rowwise.norm_sum(x, y, gain, EPS)[0], torch.add, [rows, added])
    require_right(lambda x, y: rowwise.norm_sum(x, y, None, EPS)[1], lambda x, y: rms(x + y, 1), [rows, added])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("form", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_and_their_gradients(shape, form):
    torch.manual_seed(2)
    operands = 3 * torch.randn(shape), torch.randn(shape)
    require_right(lambda *both: rowwise.gated(*both, form), lambda g, u: ACTIVATIONS[form](g) * u, operands)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("size", "rotated"), [(2, 2), (40, 40), (40, 12), (66, 34)])
def test_rotary_positions_and_their_gradients_in_batches_and_with_own_angles(size, rotated):
    torch.manual_seed(3)
    angles = torch.rand(7, 1, rotated // 2) * 6
    cosines, sines = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    for shape in [(7, 3, size), (2, 7, 3, size)]:
        rows = torch.randn(shape)
        require_right(lambda x: rowwise.rotate(x, cosines, sines), lambda x: turned(x, cosines, sines), [rows])


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("vocabulary", [1, 7, 16, 1003])
def test_losses_and_their_gradients_and_ids_that_do_not_count(vocabulary):
    torch.manual_seed(8)
    logits, ids = 20 * torch.randn(9, vocabulary), torch.randint(0, vocabulary, (9,))
    logits[4] *= 1e30
    ids[2] = ids[7] = -100
    wide = logits.double().requires_grad_()
    wanted = functional.cross_entropy(wide, ids, reduction="none")
    (gradients,) = torch.autograd.grad(wanted.sum(), wide)
    for wants in (False, True):
        given = logits.clone()
        found = rowwise.losses(given, ids, Targets(), gradients=wants)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given.double(), gradients, rtol=1e-5, atol=1e-6)
    ids[3], ids[5] = vocabulary, -1
    wrong = rowwise.losses(logits.clone(), ids, Targets(), gradients=False).isnan()
    assert wrong.nonzero()[:, 0].tolist() == [3, 5]
    assert rowwise.losses(logits, ids, Targets(smoothing=0.1), gradients=False) is None


@pytest.mark.usefixtures("_best_kernels")
def test_results_have_the_same_bits_on_any_number_of_threads():
    torch.manual_seed(7)
    rows, gain, angles = torch.randn(2, 301, 3, 32), torch.randn(32), torch.randn(301, 1, 32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(
                with_gradients(
                    lambda x, g: (
                        rowwise.norm(x, g, EPS), rowwise.gated(x, x + 1, "silu"), rowwise.rotate(x, angles, angles)
                    ),
                    [rows, gain],
                )
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for more in found[1:] for one, other in zip(found[0], more, strict=True))


@pytest.mark.usefixtures("_best_kernels")
def test_what_kernels_cannot_read_is_left_to_pytorch():
    rows, inside = torch.ones(3, 4), []
    assert rowwise.norm(rows.double(), None, EPS) is None
    assert rowwise.gated(rows, torch.ones(1, 4), "silu") is None
    torch.func.vmap(lambda row: inside.append(rowwise.norm(row, None, EPS)) or row)(rows)
    assert inside == [None]
    assert CpuRotary().refusals(RotaryProblem(form="pairs", row_size=4, dtype="float32", device="cpu"))
