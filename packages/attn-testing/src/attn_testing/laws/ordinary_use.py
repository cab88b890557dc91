"""Laws of what people do with any torch module beside training it and serving it."""

from __future__ import annotations

import copy

import torch

from attn_testing.law import LawBroken, MechanismLaw, require, require_same
from attn_testing.subject import Case


class Copied(MechanismLaw):
    """A deep copy of a layer computes the same, before and after a training pass, with parameters of its own."""

    cases_at_most = 3

    def test_a_deep_copy_computes_the_same_with_parameters_of_its_own(self, case: Case) -> None:
        layer, rows, source = case.build(), case.rows(2, case.tokens), case.source(2, case.tokens)
        for moment in ("a new layer", "a layer after a training pass"):
            try:
                other = copy.deepcopy(layer)
            except Exception as error:
                raise LawBroken(f"{moment} cannot be copied: {type(error).__name__}: {error}") from error
            shared = {id(tensor) for tensor in layer.parameters()} & {id(tensor) for tensor in other.parameters()}
            require(not shared, f"{moment} shares parameters with its copy")
            with torch.no_grad():
                outputs = [case.attend(rows, source, None, each.eval()) for each in (other, layer)]
            require_same(*outputs, f"outputs of {moment} and its copy", 1e-12)
            case.attend(rows.clone().requires_grad_(), source, None, layer.train())
