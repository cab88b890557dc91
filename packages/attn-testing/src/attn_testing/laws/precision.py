"""Fewer bits give the same answer, less precisely."""

from __future__ import annotations

import torch
from attn_core import Capability
from torch import Tensor

from attn_testing.case import Case
from attn_testing.expect import require, require_same
from attn_testing.law import MechanismLaw

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
MOSTLY = 0.7
"""The share of rows that rounding must leave as they are where keys are chosen by comparing numbers."""


class Precision(MechanismLaw):
    """A layer in float32 or bfloat16 answers in that type, close to its float64 answer."""

    cases_at_most = 4

    def test_fewer_bits_give_nearly_the_same_in_their_own_type(self, case: Case) -> None:
        for dtype, tolerance in TOLERANCES.items():
            layer = case.build(dtype=dtype)
            exact = case.build(dtype=dtype).double()
            query, source = case.rows(2, 6).to(dtype), case.source(2, 5)
            source = None if source is None else source.to(dtype)
            with torch.no_grad():
                out = case.attend(query, source, None, layer)
                expected = case.attend(query.double(), None if source is None else source.double(), None, exact)
            require(out.dtype == dtype, f"a {dtype} layer answers in {out.dtype}")
            if case.mechanism.can(Capability.CHOOSES):
                require_mostly_same(out.double(), expected, f"{dtype} and float64", tolerance)
            else:
                require_same(out.double(), expected, f"{dtype} and float64", tolerance)


def require_mostly_same(found: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    """Raise `LawBroken` unless all of [..., width] is finite and most rows are the same: some choose otherwise."""
    require(bool(torch.isfinite(found).all()), f"{what}: an output is not finite")
    error = (found - expected).abs() / (1 + expected.abs())
    share = (error.amax(-1) <= tolerance).double().mean().item()
    require(share >= MOSTLY, f"{what} differ in {1 - share:.0%} of the rows, at most {1 - MOSTLY:.0%} may")
