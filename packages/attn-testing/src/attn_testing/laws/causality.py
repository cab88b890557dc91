"""Laws of which inputs an output depends on: only earlier ones if a mechanism is causal, later ones if it is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from attn_core import Capability, DeclaredMechanism

from attn_testing.law import MechanismLaw, require, require_same
from attn_testing.subject import Case, in_mode


class CausalityByGradient(MechanismLaw):
    """The gradient of an output to each later input is exactly zero, and to its own or some earlier input it is not.

    Checked for every output of a short sequence, and for some of a long one, in evaluation and in training.
    """

    needs: ClassVar[tuple[Capability, ...]] = (Capability.CAUSAL,)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return None if case.causal else "it is configured not causal"

    def test_no_gradient_reaches_a_later_input(self, case: Case) -> None:
        no_gradient_from_behind(case, 9, range(9), training=False)

    def test_no_gradient_reaches_a_later_input_among_many_tokens_or_in_training(self, case: Case) -> None:
        for training in (False, True):
            no_gradient_from_behind(case, case.tokens, (0, case.tokens // 2, case.tokens - 2), training=training)


def no_gradient_from_behind(case: Case, tokens: int, places: Iterable[int], *, training: bool) -> None:
    """Raise `LawBroken` if the outputs at these places have gradients to later inputs, or none to earlier ones."""
    query = case.rows(1, tokens).requires_grad_()
    out = in_mode(case, query, case.source(1, 5), training=training)
    probe = torch.randn(out.shape[-1], generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    mode = "in training " * training
    for row in places:
        (gradient,) = torch.autograd.grad((out[0, row] * probe).sum(), query, retain_graph=True)
        later = gradient[0, row + 1 :].abs().sum().item()
        require(later == 0, f"{mode}the gradient of output {row} with respect to later inputs is {later:g}")
        seen = gradient[0, : row + 1].abs().sum().item()
        if blind(case, row):
            require(seen == 0, f"{mode}output {row} depends on inputs that the mask hides: the gradient is {seen:g}")
        else:
            require(seen > 0, f"{mode}output {row} depends on no input at all")


def blind(case: Case, row: int) -> bool:
    """Whether the mask of a declared mechanism allows no key to this query, such as j < i for the first one."""
    mechanism = case.mechanism
    return isinstance(mechanism, DeclaredMechanism) and mechanism.spec(case.config).mask.count(1, row + 1) == 0


SIZES = (1.0, 1e3)
"""The sizes of the changed inputs; large ones also reveal, for example, a maximum that is taken over the whole row."""


class CausalityByPerturbation(MechanismLaw):
    """Changing later inputs, a little or a lot, changes no output before them."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.CAUSAL,)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        return None if case.causal else "it is configured not causal"

    def test_changing_later_inputs_changes_no_earlier_output(self, case: Case) -> None:
        no_change_from_behind(case, 9, (1, 4, 8), training=False)

    def test_changing_later_inputs_changes_none_among_many_tokens_or_in_training(self, case: Case) -> None:
        for training in (False, True):
            no_change_from_behind(case, case.tokens, (case.tokens // 2, case.tokens - 1), training=training)


def no_change_from_behind(case: Case, tokens: int, places: Iterable[int], *, training: bool) -> None:
    """Raise `LawBroken` unless outputs before each of these places stay the same if inputs from there on change."""
    query, source = case.rows(2, tokens), case.source(2, 5)
    with torch.no_grad():
        before = in_mode(case, query, source, training=training)
        for first in places:
            for size in SIZES:
                changed = query.clone()
                changed[:, first:] = size * case.rows(2, tokens - first, seed=3)
                after = in_mode(case, changed, source, training=training)
                mode = " in training" * training
                what = f"outputs before position {first}{mode} with original and changed inputs from there on"
                require_same(after[:, :first], before[:, :first], what, 1e-10)


class Bidirectionality(MechanismLaw):
    """With `causal=False`, outputs do depend on later inputs."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.BIDIRECTIONAL,)

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        if case.cross:
            return "it attends to a source"
        return "it is configured causal" if case.causal else None

    def test_changing_a_later_input_changes_an_earlier_output(self, case: Case) -> None:
        query = case.rows(2, 9)
        changed = query.clone()
        changed[:, 1:] = case.rows(2, 8, seed=3)
        with torch.no_grad():
            difference = (case.attend(changed)[:, 0] - case.attend(query)[:, 0]).abs().max().item()
        require(difference > 1e-6, f"changing later inputs changes the first output by only {difference:g}")
