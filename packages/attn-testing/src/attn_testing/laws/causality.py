"""Laws of what an output may depend on: earlier inputs where a mechanism is causal, later ones where it is not."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Capability, DeclaredMechanism

from attn_testing.law import MechanismLaw, require, require_same
from attn_testing.subject import Case


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
