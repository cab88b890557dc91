"""Attention with dropout by a kernel of training, where this machine has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs
from attn_core.kernels.attend import AttendKernel, AttendProblem
from attn_core.kernels.base import Anything, Condition, OneOf
from attn_core.kernels.product import WholeAttentionProblem, whole_attention_table

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


class WholeDropped(AttendKernel):
    """What weights are dropped by the kernel of `whole_attention`; calls that it refuses, such as small ones, and
    compiled graphs are computed plainly. Both drop the same weights.
    """

    name = "whole_dropped"
    summary = "attention with dropout by the CPU kernels of training"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot", "dot"),
        "mask": OneOf("full", "causal"),
        "key_size": Anything(),
        "value_size": Anything(),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "dropout": OneOf(True),  # noqa: FBT003 -- the value that a field must have
        "gradients": Anything(),
        "dtype": OneOf("float32"),
        "device": OneOf("cpu"),
    }

    def available(self) -> str | None:
        """That no kernel of whole attention can run here, or None."""
        return None if whole_attention_table() is not None else "no kernel of whole_attention can run on this machine"

    def further_refusals(self, problem: AttendProblem) -> list[str]:
        """Why the kernels of whole attention refuse dropout."""
        table = whole_attention_table()
        if table is None:
            return []
        asked = WholeAttentionProblem(
            causal=problem.mask == "causal", dropout=True, gradients=problem.gradients, dtype=problem.dtype
        )
        refused = [kernel.refusals(asked) for kernel in table.kernels]
        return [] if not all(refused) else [reason for reasons in refused for reason in reasons]

    def cost(self, problem: AttendProblem) -> float:  # noqa: ARG002 -- the same for every problem
        """Measured on two cores of a Zen 4, forwards and backwards: 0.42 of the plain time for 64 tokens, 0.23 for 256,
        0.12 for 1024."""
        return 0.25

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]."""
        from attn_variants.compute.whole import attend

        return attend(spec, operands)

    def run_in_graph(self, spec: AttentionSpec, name: str, operands: AttentionInputs) -> Tensor:  # noqa: ARG002 -- of graphs that name specs
        """Plainly: torch cannot see into the kernel."""
        from attn_variants.compute.plain import attend

        return attend(spec, operands)
