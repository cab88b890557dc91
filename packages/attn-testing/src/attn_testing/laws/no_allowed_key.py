"""A query that may see nothing gets nothing: zeros, never not-a-number."""

from __future__ import annotations

from typing import ClassVar

import torch
from attn_core import Capability
from torch import Tensor

from attn_testing.case import Case
from attn_testing.expect import require
from attn_testing.law import MechanismLaw


class NoAllowedKey(MechanismLaw):
    """Without any allowed key, output, weights and gradients are zero, and all gradients are finite."""

    needs: ClassVar[tuple[Capability, ...]] = (Capability.PADDING,)

    def test_a_sequence_without_real_keys_gives_zeros(self, case: Case) -> None:
        query, source, key_padding_mask = blocked(case)
        require_silence(case, case.attend(query, source, key_padding_mask)[1], "a sequence without real keys")

    def test_a_causal_query_before_the_first_real_key_gives_zeros(self, case: Case) -> None:
        if case.cross or not case.causal:
            return
        key_padding_mask = torch.tensor([[False, False, True, True]])
        require_silence(
            case, case.attend(case.rows(1, 4), None, key_padding_mask)[0, :2], "queries before the first real key"
        )

    def test_gradients_stay_finite_and_none_reaches_the_masked(self, case: Case) -> None:
        query, source, key_padding_mask = blocked(case)
        layer = case.build()
        inputs = [given.requires_grad_() for given in (query, source) if given is not None]
        out = case.attend(query, source, key_padding_mask, layer)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        for name, tensor in [*((f"input {i}", x) for i, x in enumerate(inputs)), *layer.named_parameters()]:
            if tensor.grad is not None:
                require(bool(torch.isfinite(tensor.grad).all()), f"the gradient to {name} is not finite")
        for given in inputs:
            reached = 0.0 if given.grad is None else given.grad[1].abs().max().item()
            require(reached == 0, f"a gradient of {reached:g} reaches a sequence without real keys")

    def test_weights_are_zero(self, case: Case) -> None:
        if case.mechanism.can(Capability.WEIGHTS):
            query, source, key_padding_mask = blocked(case)
            weights = case.weights(query, source, key_padding_mask)[1]
            require(bool((weights == 0).all()), f"weights without any allowed key reach {weights.abs().max().item():g}")


def blocked(case: Case) -> tuple[Tensor, Tensor | None, Tensor]:
    """Two sequences of 4 tokens; the second has no real key."""
    key_padding_mask = torch.tensor([[True, True, True, False], [False] * 4])
    return case.rows(2, 4), case.source(2, 4), key_padding_mask


def require_silence(case: Case, out: Tensor, what: str) -> None:
    """Raise `LawBroken` unless rows [row, width] are zero, or with biases one constant row."""
    require(bool(torch.isfinite(out).all()), f"{what}: the output is not finite")
    left = (out - out[:1]).abs().max().item() if case.config.bias else out.abs().max().item()
    require(left <= 1e-12, f"{what}: the output reaches {left:g}, not zero")
