"""Base classes for kernels of attention and recurrences that torch.compile keeps as one operator of its graph.

They are not in the folder `backends`, because torch.compile traces no file whose path contains "triton/backends".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import AttentionInputs
from attn_core.kernels.attend import AttendKernel
from attn_core.kernels.recurrence import RecurrenceKernel, Steps

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


class InGraph(AttendKernel):
    """An attention kernel that is a custom operator in a compiled graph, if the spec has a name.

    A spec that holds a function or a tensor has none: the graph then breaks around the call of the kernel.
    """

    def run_in_graph(self, spec: AttentionSpec, name: str, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `attention.operators.attend`."""
        if not name:
            return self.run(spec, operands)
        # Imported here so that only processes that compile load torch's custom operators.
        from attn_kernels_triton.attention.operators import attend

        out: Tensor = attend(name, spec, operands)
        return out


class ChunksInGraph(RecurrenceKernel):
    """A recurrence kernel over chunks that is a custom operator in a compiled graph."""

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 -- chunks as fit the chip
        """Outputs and the state after the last step, float32; see `recurrence.compute.by_chunks`."""
        import torch

        found: tuple[Tensor, Tensor]
        if torch.compiler.is_compiling():
            from attn_kernels_triton.recurrence.operators import by_chunks as in_graph

            found = in_graph(steps, before)
        else:
            from attn_kernels_triton.recurrence.compute import by_chunks

            found = by_chunks(steps, before)
        return found
