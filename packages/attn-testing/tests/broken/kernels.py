"""A kernel that keeps every law of kernels, and kernels that each break one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from attn_core import AttentionInputs, AttentionSpec, Full
from attn_core.kernels.attend import AttendKernel, AttendProblem
from attn_core.kernels.base import Anything, Condition, OneOf
from torch import Tensor

from attn_testing import oracle
from attn_testing.law import Law
from attn_testing.laws import kernel


class SoundKernel(AttendKernel):
    """The oracle's definition of attention as a kernel."""

    name = "sound"
    summary = "The definition."
    accepts: ClassVar[Mapping[str, Condition]] = {
        "mask": OneOf("full", "causal", "window"),
        "key_size": Anything(),
        "value_size": Anything(),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "padded": Anything(),
        "gradients": Anything(),
        "dtype": OneOf("float32", "float64"),
    }

    def cost(self, problem: AttendProblem) -> float:
        """Twice the cost of the plain kernel."""
        return 2.0

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]."""
        return oracle.attend(spec, operands)


class ForgetsTheWindow(SoundKernel):
    """Breaks agreement with the oracle: accepts windows and ignores them."""

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output, with a full mask in place of a window."""
        return super().run(dataclasses.replace(spec, mask=Full()) if spec.mask.kind == "window" else spec, operands)


class TakesAnything(SoundKernel):
    """Breaks refusal: declares which masks it accepts, and refuses no mask."""

    def refusals(self, problem: AttendProblem) -> list[str]:
        """The refusals of all fields but the mask."""
        return [reason for reason in super().refusals(problem) if reason.partition(":")[0] != "mask"]


BROKEN_KERNELS: Mapping[type[Law], AttendKernel] = {
    kernel.AgreesWithOracle: ForgetsTheWindow(),
    kernel.RefusesTheRest: TakesAnything(),
}
"""For each law a kernel that breaks it."""
