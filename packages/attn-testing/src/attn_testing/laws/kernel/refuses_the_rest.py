"""A kernel refuses problems that it does not accept."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from attn_core.errors import KernelRefused
from attn_core.kernels.attend import AttendProblem
from attn_core.kernels.base import Anything, Kernel, Problem
from attn_core.kernels.dispatch import choose
from attn_core.plugins.registry import Registry

from attn_testing.kernel_subject import STRANGE, VALUES, KernelSubject, with_field
from attn_testing.law import Law, LawBroken, require


class UnheardOf(Problem):
    """A problem of an unknown operation, which every kernel must refuse."""

    operation: ClassVar[str] = "unheard_of"


class RefusesTheRest(Law):
    """A value that is not accepted is refused by the name of its field, and choosing the kernel by name then raises."""

    def test_refused_values_are_named_and_raise(self, subject: KernelSubject) -> None:
        kernels: Registry[Kernel[Any]] = Registry("kernel")
        kernels.register(subject.kernel, "kit")
        for field, values in VALUES.items():
            condition = subject.kernel.accepts.get(field)
            for value in (*values, *([STRANGE[field]] if field in STRANGE else [])):
                problem = with_field(subject.base, field, value)
                if condition is not None and condition.refuses(value) is None:
                    continue
                if condition is None and value == getattr(AttendProblem, field):
                    continue
                named = [reason.partition(":")[0] for reason in subject.kernel.refusals(problem)]
                require(
                    field in named, f"{field}={value!r} is not in `accepts`, but no refusal names the field: {named}"
                )
                try:
                    choose(kernels, problem, subject.kernel.name)
                except KernelRefused:
                    continue
                raise LawBroken(f"chosen by name with {field}={value!r}, the kernel is not refused")

    def test_values_that_nobody_knows_are_refused_unless_anything_is_accepted(self, subject: KernelSubject) -> None:
        for field, value in STRANGE.items():
            if not isinstance(subject.kernel.accepts.get(field), Anything):
                refused = subject.kernel.refusals(dataclasses.replace(subject.base, **{field: value}))
                require(refused or field.endswith("_size"), f"{field}={value!r} is accepted")

    def test_other_operations_are_refused(self, subject: KernelSubject) -> None:
        found = subject.kernel.refusals(UnheardOf())  # type: ignore[arg-type]  # which is the point
        require(found, "a problem of an unknown operation is accepted")

    def test_the_price_is_a_positive_number(self, subject: KernelSubject) -> None:
        for case in subject.cases:
            price = subject.kernel.cost(case.problem)
            require(0 < price < float("inf"), f"{case.label}: the cost is {price}")
