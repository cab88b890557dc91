"""How far a kernel may be from float64: the plain computation in the same type is the measure."""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR, ROUNDINGS = 1.25, 2
RECOMPUTED = 1
"""One more rounding for gradients: weights are computed again from logarithms that were stored in float32."""
CANCELLED = 4
"""More roundings for gradients to biases of distances: sums of changes that nearly cancel, as those of a query do."""
REORDERED = 3
"""Roundings of float32 besides, in which every type sums: how far the plain computation is from float64 depends on the
order in which this machine's vector instructions add, and sums that nearly cancel show it."""
WORST = 4.0
"""How many times the worst error of the plain computation the worst error of an element may be, besides roundings."""


def roundings_of(result: str) -> int:
    """How many roundings a result of this name may be off."""
    return ROUNDINGS + RECOMPUTED * result.startswith("gradient") + CANCELLED * result.endswith("table")


def require_close(found: Tensor, plain: Tensor, exact: Tensor, what: str, roundings: int = ROUNDINGS) -> None:
    """Fail unless `found` is nearly as close to `exact`, float64, as `plain`, the same type, is."""
    eps = torch.finfo(found.dtype).eps
    rounding = roundings * eps + REORDERED * torch.finfo(torch.float32).eps
    assert found.shape == exact.shape, what
    assert found.isfinite().all(), f"{what}: not every element is a number"
    size = torch.linalg.vector_norm(exact)
    error, usual = (torch.linalg.vector_norm(some.double() - exact) for some in (found, plain))
    if size == 0:
        assert error <= roundings * eps * exact.numel() ** 0.5, f"{what}: {error:.2e} where nothing is"
        return
    allowed = FACTOR * usual + rounding * size
    assert error <= allowed, f"{what}: relative error {error / size:.2e}, allowed {allowed / size:.2e}"
    worst, usual = ((some.double() - exact).abs().max() for some in (found, plain))
    allowed = WORST * (usual + rounding * exact.abs().max())
    assert worst <= allowed, f"{what}: worst error {worst:.2e}, allowed {allowed:.2e}"
