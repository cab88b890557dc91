"""Fewer bits give the same answer, less precisely."""

from __future__ import annotations

import torch

from attn_testing.case import Case
from attn_testing.expect import require, require_same
from attn_testing.law import MechanismLaw

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-1}


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
            require_same(out.double(), expected, f"{dtype} and float64", tolerance)
