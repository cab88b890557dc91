"""How torch.compile meets the Triton kernels of attention and of recurrences: each call is one operator of its graph.

They are not among the backends, for torch.compile looks into no file whose path has "triton/backends" in it.
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
    """A kernel that is an operator in a graph, where the spec has a name.

    Where it has none, because it holds a function or a tensor, the kernel is called between two graphs.
    """

    def run_in_graph(self, spec: AttentionSpec, name: str, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `attention.operators.attend`."""
        if not name:
            return self.run(spec, operands)
        # Made by a part of torch that only a process which compiles need load.
        from attn_kernels_triton.attention.operators import attend

        out: Tensor = attend(name, spec, operands)
        return out


class ChunksInGraph(RecurrenceKernel):
    """A recurrence over chunks that is an operator in a graph."""

    def run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 -- chunks as fit the chip
        """Outputs and the memory after them, float32; see `recurrence.compute.by_chunks`."""
        return self._run(steps, before, 0)

    def run_replaceable(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        """The same; in a graph, where this chip cannot run it, the next kernel computes, by chunks of this size."""
        return self._run(steps, before, chunk)

    def _run(self, steps: Steps, before: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        import torch

        found: tuple[Tensor, Tensor]
        if torch.compiler.is_compiling():
            from attn_kernels_triton.recurrence.operators import by_chunks as in_graph

            found = in_graph(steps, before, chunk)
        else:
            from attn_kernels_triton.recurrence.compute import by_chunks

            found = by_chunks(steps, before)
        return found
