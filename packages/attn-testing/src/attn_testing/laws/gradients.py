"""Gradients are those of the function computed."""

from __future__ import annotations

from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.func import functional_call

from attn_testing.case import Case
from attn_testing.expect import LawBroken
from attn_testing.law import MechanismLaw


class Gradients(MechanismLaw):
    """In float64, gradients to inputs and weights equal finite differences."""

    def test_gradients_equal_finite_differences(self, case: Case) -> None:
        query, source = case.rows(1, 3), case.source(1, 3)
        layer = case.build()
        names = [name for name, _ in layer.named_parameters()]
        inputs = [query] if source is None else [query, source]
        values = [*inputs, *(weight.detach() for _, weight in layer.named_parameters())]

        def compute(*tensors: Tensor) -> Tensor:
            weights = dict(zip(names, tensors[len(inputs) :], strict=True))
            out: Tensor = functional_call(layer, weights, tensors[: len(inputs)])
            return out

        try:
            gradcheck(compute, [value.clone().requires_grad_() for value in values], fast_mode=True)
        except GradcheckError as error:
            raise LawBroken(str(error).strip()) from error
