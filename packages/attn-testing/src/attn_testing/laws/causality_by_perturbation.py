"""No output depends on a later input: changing the future changes nothing before it."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Capability

from attn_testing.case import Case
from attn_testing.expect import require_same
from attn_testing.law import MechanismLaw

SIZES = (1.0, 1e3)
"""A large change also meets what only overflow would show, such as a maximum taken over the whole row."""


class CausalityByPerturbation(MechanismLaw):
    """Changing later inputs, a little or a lot, changes no output before them."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.CAUSAL,)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return None if case.causal else "it is configured not causal"

    def test_changing_later_inputs_changes_no_earlier_output(self, case: Case) -> None:
        query, source = case.rows(2, 9), case.source(2, 5)
        with torch.no_grad():
            before = case.attend(query, source)
            for first in (1, 4, 8):
                for size in SIZES:
                    changed = query.clone()
                    changed[:, first:] = size * case.rows(2, 9 - first, seed=3)
                    after = case.attend(changed, source)
                    what = f"outputs before position {first} with and without other inputs from there on"
                    require_same(after[:, :first], before[:, :first], what, 1e-10)
