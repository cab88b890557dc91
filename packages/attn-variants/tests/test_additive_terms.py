"""Whatever is added to scores is added before anything is rounded, by every kernel, and extremes are no NaN."""

from contextlib import suppress

import pytest
import torch
from attn_core import Window, installed
from attn_core.distributions import SoftmaxOne, SoftmaxWithSink
from attn_core.errors import KernelRefused
from attn_core.kernels.attend import AttendKernel
from attn_core.modifiers import Alibi
from attn_variants import attend

HEADS, KEYS = 4, 24
KERNELS = [kernel.name for kernel in installed().kernels if isinstance(kernel, AttendKernel)]
LOGIT = "distribution.logit"


CASES = {
    "tensor": {"attn_mask": lambda queries: 90 + 4 * torch.randn(2, HEADS, queries, KEYS)},
    "alibi": {"modifiers": (Alibi(),)},
    "window": {"modifiers": (Alibi(),), "attn_mask": Window(left=5)},
    "sink": {"distribution": SoftmaxWithSink(), "parameters": {LOGIT: torch.tensor([20.2, 40.3, 50.7, 61.1])}},
}


def all_of(dtype, queries, given):
    """The outputs of every kernel that accepts the call, and those of the plain kernel in float64."""
    torch.manual_seed(0)
    rows = [torch.randn(2, HEADS, length, 16).to(dtype) for length in (queries, KEYS, KEYS)]
    rows[0] = rows[0] * (20 if "distribution" in given else 3)
    given = {name: part(queries) if callable(part) else part for name, part in given.items()}
    wide = {name: part.double() if isinstance(part, torch.Tensor) else part for name, part in given.items()}
    if "parameters" in wide:
        wide["parameters"] = {name: part.double() for name, part in wide["parameters"].items()}
    exact, found = attend(*(part.double() for part in rows), **wide, kernel="plain"), {}
    for kernel in KERNELS:
        with suppress(KernelRefused):
            found[kernel] = attend(*rows, **given, kernel=kernel).double()
    return found, exact


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_added_to_scores_is_not_rounded_to_16_bits(dtype, queries, case):
    found, exact = all_of(dtype, queries, CASES[case])
    # Weights of at most 1 and outputs are rounded a few times; a bias of 90 or a logit of 61 by up to 0.25.
    allowed = 3 * torch.finfo(dtype).eps
    assert found.keys() >= ({"plain", "banded"} if case == "window" else {"plain", "torch_sdpa"})
    for kernel, out in found.items():
        assert ((out - exact).abs() <= allowed * (1 + exact.abs())).all(), kernel


EXTREMES = {
    "no sink": {"distribution": SoftmaxWithSink(), "parameters": {LOGIT: torch.full((HEADS,), -torch.inf)}},
    "scale 0": {"scale": 0.0},
    "scale 0 and a sink": {"scale": 0.0, "distribution": SoftmaxWithSink(), "parameters": {LOGIT: torch.ones(HEADS)}},
    "scale 0 and one": {"scale": 0.0, "distribution": SoftmaxOne()},
    "negative scale": {
        "scale": -0.5,
        "distribution": SoftmaxWithSink(),
        "parameters": {LOGIT: torch.tensor([-torch.inf, 0.0, 1.0, 2.0])},
    },
}


@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_extreme_sinks_and_scales_give_what_the_definition_says(dtype, queries, case):
    found, exact = all_of(dtype, queries, EXTREMES[case])
    assert found.keys() >= {"plain", "torch_sdpa"}
    for kernel, out in found.items():
        assert ((out - exact).abs() <= 1e-5 + 3 * torch.finfo(dtype).eps * (1 + exact.abs())).all(), kernel
