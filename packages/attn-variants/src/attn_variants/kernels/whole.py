"""Attention with dropout by the CPU kernels for training, if this machine has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs
from attn_core.kernels.attend import AttendKernel, AttendProblem
from attn_core.kernels.base import Anything, Condition, OneOf
from attn_core.kernels.product import WholeAttentionKernel, WholeAttentionProblem
from attn_core.plugins.catalog import installed_operation

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


class WholeDropped(AttendKernel):
    """Attention with dropout by a `whole_attention` kernel.

    Calls that it refuses, such as small ones, and compiled graphs use the plain computation. Both drop the same
    weights.
    """

    name = "whole_dropped"
    summary = "attention with dropout, by the CPU kernels for training"
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
        """Why no kernel of `whole_attention` can run on this machine, or None if one can."""
        able = installed_operation(WholeAttentionKernel) is not None
        return None if able else "no whole_attention kernel can run on this machine"

    def further_refusals(self, problem: AttendProblem) -> list[str]:
        """The reasons of the `whole_attention` kernels if all of them refuse the problem; else empty."""
        operation = installed_operation(WholeAttentionKernel)
        if operation is None:
            return []
        whole_problem = WholeAttentionProblem(
            causal=problem.mask == "causal", dropout=True, gradients=problem.gradients, dtype=problem.dtype
        )
        refused = [kernel.refusals(whole_problem) for kernel in operation.kernels]
        return [] if not all(refused) else [reason for reasons in refused for reason in reasons]

    def cost(self, problem: AttendProblem) -> float:  # noqa: ARG002 -- the same for every problem
        """Measured on two cores of a Zen 4, forward and backward: 0.42 of the plain time for 64 tokens, 0.23 for 256,
        0.12 for 1024."""
        return 0.25

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]."""
        from attn_variants.compute.whole import attend

        return attend(spec, operands)

    def run_in_graph(self, spec: AttentionSpec, name: str, operands: AttentionInputs) -> Tensor:  # noqa: ARG002 -- of graphs that name specs
        """The output by the plain computation, as torch.compile cannot trace the kernel."""
        from attn_variants.compute.plain import attend

        return attend(spec, operands)
