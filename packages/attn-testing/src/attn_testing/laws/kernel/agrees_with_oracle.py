"""A kernel computes the problems that it accepts correctly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec
from torch import Tensor

from attn_testing import oracle
from attn_testing.kernel_subject import KernelCase
from attn_testing.law import Law, require
from attn_testing.problems import operands_of, spec_of, tensors

Run = Callable[[AttentionSpec, AttentionInputs], Tensor]

FACTOR = 1.5
"""An error may be this many times that of the definition computed in the same dtype."""

FLOOR = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative errors that are always allowed: rounding of the result, and sums in another order."""


class AgreesWithOracle(Law):
    """For every accepted problem outputs, and gradients if accepted, equal those of the definition in float64."""

    @classmethod
    def excuse(cls, case: KernelCase) -> str | None:
        return case.absent

    def test_outputs_and_gradients_equal_those_of_the_definition(self, case: KernelCase) -> None:
        spec = spec_of(case.problem)
        for layout, operands in operands_of(case.problem).items():
            exact = results(oracle.attend, spec, wide(operands), gradients=case.problem.gradients)
            naive = results(oracle.attend, spec, operands, gradients=case.problem.gradients)
            found = results(case.kernel.run, spec, operands, gradients=case.problem.gradients)
            require(
                found["output"].dtype == operands.value.dtype, f"{layout}: the output has dtype {found['output'].dtype}"
            )
            for name, truth in exact.items():
                require(found[name].shape == truth.shape, f"{layout}: the {name} has shape {tuple(found[name].shape)}")
                error, usual = distance(found[name], truth), distance(naive[name], truth)
                allowed = FACTOR * usual + FLOOR[operands.value.dtype]
                what = f"{layout}: the relative error of the {name} is {error:.2g}, allowed {allowed:.2g}"
                require(error <= allowed, what)

    def test_operands_are_left_as_they_are(self, case: KernelCase) -> None:
        operands = operands_of(case.problem)["square"]
        before = {name: tensor.clone() for name, tensor in tensors(operands).items()}
        case.kernel.run(spec_of(case.problem), operands)
        changed = [name for name, tensor in tensors(operands).items() if not torch.equal(tensor, before[name])]
        require(not changed, f"the kernel writes to {changed}")

    def test_strides_do_not_matter(self, case: KernelCase) -> None:
        spec, operands = spec_of(case.problem), operands_of(case.problem)["square"]
        laid = {name: getattr(operands, name).transpose(1, 2).contiguous() for name in ("query", "key", "value")}
        turned = dataclasses.replace(operands, **{name: rows.transpose(1, 2) for name, rows in laid.items()})
        with torch.no_grad():
            error = distance(case.kernel.run(spec, turned), case.kernel.run(spec, operands))
        require(error <= FLOOR[operands.value.dtype], f"strided operands change the output by {error:.2g}")


def wide(operands: AttentionInputs) -> AttentionInputs:
    """The operands in float64."""
    changed = {name: getattr(operands, name).double() for name in ("query", "key", "value")}
    weights = {name: weight.double() for name, weight in operands.parameters.items()}
    return dataclasses.replace(operands, **changed, parameters=weights)


def results(run: Run, spec: AttentionSpec, operands: AttentionInputs, *, gradients: bool) -> dict[str, Tensor]:
    """The output and, with `gradients`, the gradient of a fixed weighted sum of the output to every operand."""
    if not gradients:
        with torch.no_grad():
            return {"output": run(spec, operands)}
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors(operands).items()}
    own: dict[str, Any] = {name: leaves[name] for name in ("query", "key", "value")}
    weights = {name: leaves[name] for name in operands.parameters}
    out: Tensor = run(spec, dataclasses.replace(operands, **own, parameters=weights))
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view_as(out)
    found = torch.autograd.grad((out.double() * probe).sum(), list(leaves.values()), materialize_grads=True)
    return {"output": out.detach()} | {f"gradient to {name}": grad for name, grad in zip(leaves, found, strict=True)}


def distance(found: Tensor, truth: Tensor) -> float:
    """||found - truth|| / ||truth||, or ||found|| if the truth is zero; infinite for NaN."""
    error = torch.linalg.vector_norm(found.double() - truth.double()).nan_to_num(float("inf"))
    size = torch.linalg.vector_norm(truth.double())
    return float(error / size if size > 0 else error)
