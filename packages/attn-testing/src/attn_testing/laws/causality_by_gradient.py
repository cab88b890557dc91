"""No output depends on a later input: the gradient is exactly zero."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Capability, DeclaredMechanism

from attn_testing.case import Case
from attn_testing.expect import require
from attn_testing.law import MechanismLaw


class CausalityByGradient(MechanismLaw):
    """The gradient of an output to every later input is exactly zero, and to some earlier or its own it is not."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.CAUSAL,)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return None if case.causal else "it is configured not causal"

    def test_no_gradient_reaches_a_later_input(self, case: Case) -> None:
        query = case.rows(1, 9).requires_grad_()
        out = case.attend(query, case.source(1, 5))
        probe = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(5), dtype=out.dtype)
        for row in range(9):
            (gradient,) = torch.autograd.grad((out[0, row] * probe).sum(), query, retain_graph=True)
            later = gradient[0, row + 1 :].abs().sum().item()
            require(later == 0, f"the gradient of output {row} with respect to later inputs is {later:g}")
            seen = gradient[0, : row + 1].abs().sum().item()
            if blind(case, row):
                require(seen == 0, f"output {row} depends on inputs that the mask hides: the gradient is {seen:g}")
            else:
                require(seen > 0, f"output {row} depends on no input at all")


def blind(case: Case, row: int) -> bool:
    """Whether the mask of a declared mechanism shows nothing to this query, as one of j < i does to the first."""
    mechanism = case.mechanism
    return isinstance(mechanism, DeclaredMechanism) and mechanism.spec(case.config).mask.count(1, row + 1) == 0
