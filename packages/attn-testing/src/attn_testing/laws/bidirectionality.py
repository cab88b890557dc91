"""A mechanism that is not causal looks ahead."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Capability

from attn_testing.case import Case
from attn_testing.expect import require
from attn_testing.law import MechanismLaw


class Bidirectionality(MechanismLaw):
    """Configured not causal, outputs do depend on later inputs."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.BIDIRECTIONAL,)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        if case.cross:
            return "its queries attend to a source"
        return "it is configured causal" if case.causal else None

    def test_changing_a_later_input_changes_an_earlier_output(self, case: Case) -> None:
        query = case.rows(2, 9)
        changed = query.clone()
        changed[:, 1:] = case.rows(2, 8, seed=3)
        with torch.no_grad():
            difference = (case.attend(changed)[:, 0] - case.attend(query)[:, 0]).abs().max().item()
        require(difference > 1e-6, f"other inputs after the first position changed its output by {difference:g} only")
