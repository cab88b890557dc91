from __future__ import annotations

import math

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.rowwise import Targets
from attn_kernels_triton.rowwise import rows as tiles
from attn_kernels_triton.rowwise.cross_entropy import losses
from bounds import require_close
from rowwise_definitions import leaf
from torch import Tensor
from torch.nn import functional

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = [
    Targets(),
    Targets(ignored=0),
    Targets(smoothing=0.1),
    Targets(cap=3.0),
    Targets(ignored=3, smoothing=0.2, cap=30.0),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Parts of 32 ids, so that a small vocabulary has several."""
    monkeypatch.setattr(tiles, "LOSS_WIDTH", 32)


def defined(logits: Tensor, ids: Tensor, targets: Targets) -> Tensor:
    """Losses [row] by torch's own."""
    if targets.cap is not None:
        logits = targets.cap * torch.tanh(logits / targets.cap)
    return functional.cross_entropy(
        logits, ids, ignore_index=targets.ignored, label_smoothing=targets.smoothing, reduction="none"
    )


def with_gradients(logits: Tensor, ids: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Losses and gradients of each row's loss by torch's own."""
    logits = logits.detach().requires_grad_()
    found = defined(logits, ids, targets)
    return found.detach(), torch.autograd.grad(found.sum(), logits)[0]


@pytest.mark.sweep(20)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("targets", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 2), (4, 32), (6, 75)], ids=str)
def test_losses_and_gradients_are_those_of_the_definition(shape, targets, dtype):
    logits = leaf(*shape, seed=1, dtype=dtype, scale=4)
    ids = torch.arange(shape[0]) % shape[1]
    exact, exact_change = with_gradients(logits, ids, targets)
    usual, usual_change = with_gradients(logits.to(dtype), ids, targets)
    given = logits.to(dtype)
    found = losses(given, ids, targets, gradients=True)
    assert found.dtype == torch.float32
    require_close(found.to(dtype), usual, exact, "losses")
    require_close(given, usual_change, exact_change, "gradients")


def test_without_gradients_logits_stay():
    logits = leaf(3, 40, seed=1).float()
    before = logits.clone()
    found = losses(logits, torch.tensor([0, 39, 7]), Targets(), gradients=False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(found, defined(before, torch.tensor([0, 39, 7]), Targets()))


def test_ignored_rows_have_loss_and_gradient_zero_whatever_their_logits():
    logits = leaf(3, 40, seed=1).float()
    logits[1] = float("nan")
    found = losses(logits, torch.tensor([3, -100, 4]), Targets(), gradients=True)
    assert found[1] == 0
    assert not logits[1].any()
    assert found.isfinite().all()
    assert logits.isfinite().all()


def test_logits_of_any_size_neither_overflow_nor_vanish():
    logits = torch.tensor([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38], [1e4, 1e4, -math.inf]])
    expected, change = with_gradients(logits, torch.tensor([0, 1, 0]), Targets())
    found = losses(logits, torch.tensor([0, 1, 0]), Targets(), gradients=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits, change)


def test_ids_that_a_mask_of_infinities_excludes_get_no_gradient():
    logits = leaf(2, 70, seed=1).float()
    logits[:, :40] = -math.inf
    expected, change = with_gradients(logits, torch.tensor([50, 60]), Targets())
    found = losses(logits, torch.tensor([50, 60]), Targets(), gradients=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits, change)


@pytest.mark.parametrize("wrong", [-1, 40, 2**40])
def test_an_id_outside_the_vocabulary_is_no_number_and_reads_nothing(wrong):
    logits = leaf(2, 40, seed=1).float()
    found = losses(logits, torch.tensor([wrong, 5]), Targets(), gradients=True)
    assert found.isnan().tolist() == [True, False]
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()


def test_rows_that_lie_apart_in_memory_are_judged_in_place():
    wide = leaf(4, 60, seed=1).float()
    ids = torch.tensor([1, 2])
    _, change = with_gradients(wide[::2, :50], ids, Targets())
    rest = wide[1::2].clone(), wide[:, 50:].clone()
    losses(wide[::2, :50], ids, Targets(), gradients=True)
    torch.testing.assert_close(wide[::2, :50], change)
    assert torch.equal(wide[1::2], rest[0])
    assert torch.equal(wide[:, 50:], rest[1])


def test_no_rows_have_no_losses():
    assert losses(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), Targets(), gradients=True).shape == (0,)


@pytest.mark.parametrize(
    ("logits", "ids", "named"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), "logits"),
        (torch.zeros(2, 4).double(), torch.zeros(2, dtype=torch.int64), "logits.dtype"),
        (torch.zeros(4, 2).T, torch.zeros(2, dtype=torch.int64), "logits.stride"),
        (torch.zeros(1, 4).expand(2, 4), torch.zeros(2, dtype=torch.int64), "logits.stride"),
        (torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64), "ids"),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32), "ids.dtype"),
        (torch.zeros(1, 1).expand(2**31, 1), torch.zeros(1, dtype=torch.int64), "logits: rows"),
        (torch.zeros(1, 0), torch.zeros(1, dtype=torch.int64), "logits"),
    ],
)
def test_logits_that_programs_would_misread_are_refused_by_name(logits, ids, named):
    with pytest.raises(InvalidValue) as refused:
        losses(logits, ids, Targets(), gradients=True)
    assert refused.value.metadata["field"] == named
