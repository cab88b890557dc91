"""The declarations of the kernels for whole decoder blocks, and for attention to cached rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.kernels.attend import BAND, LATENT, PagedAttendKernel, PagedAttendProblem, PagedAttentionInputs
from attn_core.kernels.base import Anything, AtMost, Condition, MultipleOf, OneOf
from attn_core.kernels.block import BlockKernel, BlockParts, BlockProblem, BlockStep, StackStep
from attn_core.kernels.product import FORMS

from attn_kernels_cpu.compiling import why_not

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor

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
    """A whole block: norms, of heads and of outputs too, projections, rotary positions, attention over the KV cache in
    place, a gated feed-forward."""

    name = "cpu_block"
    summary = "a whole pre-norm block with causal or windowed attention and a gated feed-forward, in C++"

    accepts: ClassVar[Mapping[str, Condition]] = {
        "linears": OneOf("attn_kernels_cpu.packed.PackedLinear"),
        "mask": OneOf(BAND),
        "key_size": HeadSize(),
        "value_size": Anything(),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "norm": OneOf("", "qk_norm"),
        "intermediate_size": MultipleOf(VECTOR),
        "activation": OneOf(*FORMS),
        "output_norms": Anything(),
    }

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def further_refusals(self, problem: BlockProblem) -> list[str]:
        """Refuse values whose size differs from that of keys."""
        return _sizes_apart(problem)

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


class CpuPaged(PagedAttendKernel):
    """Causal attention, in a window or not, of float32 queries to cached keys and values, which are not copied: in
    float32, bfloat16, float16, or int8 codes."""

    name = "cpu_paged"
    summary = "attention over a paged KV cache, read in place, in C++"

    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot"),
        "distribution": OneOf("softmax"),
        "mask": OneOf(BAND),
        "key_size": HeadSize(),
        "value_size": Anything(),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "rows": OneOf("plain", "int8", "float16"),
        "dtype": OneOf("float32"),
        "device": OneOf("cpu"),
        "batch_invariant": Anything(),
    }

    def available(self) -> str | None:
        """Why the kernel cannot run here, or None; it uses the library that packed weights have loaded."""
        return why_not() or unloaded()

    def further_refusals(self, problem: PagedAttendProblem) -> list[str]:
        """Refuse values whose size differs from that of keys."""
        return _sizes_apart(problem)

    def cost(self, problem: PagedAttendProblem) -> float:  # noqa: ARG002 -- the same for every size
        """An estimate of the time relative to gathering the rows first."""
        return 0.3

    def run(self, spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
        """The output [tokens, heads, value_size]."""
        from attn_kernels_cpu.paged import attend

        return attend(spec, operands)


class CpuLatent(CpuPaged):
    """Causal attention of float32 queries to cached latents and rotary keys, in float32 or bfloat16, where they lie."""

    name = "cpu_latent"
    summary = "attention over cached latents (MLA), read in place, in C++"

    accepts: ClassVar[Mapping[str, Condition]] = {
        **{name: condition for name, condition in CpuPaged.accepts.items() if name != "batch_invariant"},
        "key_size": MultipleOf(VECTOR),
        "value_size": MultipleOf(VECTOR),
        "rows": OneOf(LATENT),
    }

    def further_refusals(self, problem: PagedAttendProblem) -> list[str]:  # noqa: ARG002 -- any sizes
        """None: values are the first part of keys."""
        return []


def unloaded() -> str | None:
    """That the library is not loaded yet, None if it is."""
    from attn_kernels_cpu.library import is_loaded

    return None if is_loaded() else "the compiled kernels are not loaded; packed weights load them"


def _sizes_apart(problem: BlockProblem | PagedAttendProblem) -> list[str]:
    if problem.key_size == problem.value_size:
        return []
    return [f"value_size: {problem.value_size} differs from key_size {problem.key_size}"]
