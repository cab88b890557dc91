"""The declaration of the kernel for whole decoder blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core.kernels.attend import BAND
from attn_core.kernels.base import Anything, AtMost, Condition, MultipleOf, OneOf
from attn_core.kernels.block import BlockKernel, BlockParts, BlockProblem, BlockStep, StackStep

from attn_kernels_cpu.compiling import why_not

VECTOR = 16
"""The number of elements of a vector."""
LARGEST_HEAD = 512


@dataclass(frozen=True)
class HeadSize:
    """A head size that is a multiple of `VECTOR`, up to `LARGEST_HEAD`, the size of the kernels' buffers."""

    def refuses(self, value: Any) -> str | None:
        """Why the size is refused, or None if it is accepted."""
        return MultipleOf(VECTOR).refuses(value) or AtMost(LARGEST_HEAD).refuses(value)


class CpuBlock(BlockKernel):
    """A whole block: norms, projections, rotary embedding, attention over the KV cache in place, and a gated
    feed-forward."""

    name = "cpu_block"
    summary = "a whole pre-norm block with causal or windowed attention and SwiGLU, in C++"

    accepts: ClassVar[Mapping[str, Condition]] = {
        "linears": OneOf("attn_kernels_cpu.packed.PackedLinear"),
        "mask": OneOf(BAND),
        "key_size": HeadSize(),
        "value_size": Anything(),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "intermediate_size": MultipleOf(VECTOR),
    }

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: BlockProblem) -> list[str]:
        """Refuse values whose size differs from that of keys."""
        if problem.key_size == problem.value_size:
            return []
        return [f"value_size: {problem.value_size} differs from key_size {problem.key_size}"]

    def cost(self, problem: BlockProblem) -> float:  # noqa: ARG002 -- the same for every size
        """An estimate: as fast as the linear kernels of this package, without PyTorch's overhead per operation."""
        return 0.5

    def build(self, parts: BlockParts) -> BlockStep:
        """A `CpuBlockStep`."""
        from attn_kernels_cpu.block_step import CpuBlockStep

        return CpuBlockStep(parts)

    def stack(self, steps: Sequence[Any]) -> StackStep:
        """A `CpuStackStep`."""
        from attn_kernels_cpu.block_step import CpuStackStep

        return CpuStackStep(steps)
