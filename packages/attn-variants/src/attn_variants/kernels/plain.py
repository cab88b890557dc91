"""The plain computation: every score, mask, modifier and distribution, written as in the papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs, Kernel
from attn_core.kernels.base import DEFAULTS, Anything, Condition, Problem

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


class Plain(Kernel):
    """Accepts every `attend` of one text a row, keeps all scores in memory and is chosen last."""

    name = "plain"
    summary = "the equation in torch; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {field: Anything() for field in DEFAULTS if field != "varlen"}

    def cost(self, problem: Problem) -> float:  # noqa: ARG002 -- the unit is the same for every problem
        """The unit of all costs."""
        return 1.0

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.plain.attend`."""
        from attn_variants.compute.plain import attend

        return attend(spec, operands)
