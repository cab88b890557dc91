"""The kernel of whole decoder blocks: what it can compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attn_core import AttentionSpec, Window
from attn_core.kernels.block import BlockKernel, BlockParts, BlockStep, StackStep

from attn_kernels_cpu.compiling import why_not

VECTOR = 16
"""Elements that are computed at once."""
LARGEST_HEAD = 512


class CpuBlock(BlockKernel):
    """Norms, projections, rotary positions, attention to rows where they lie, and a gated feed-forward."""

    name = "cpu_block"
    summary = "a whole pre-norm block with causal or windowed attention and SwiGLU, in C++"

    def available(self) -> str | None:
        """Why the kernels cannot run here, or None."""
        return why_not()

    def refuses(self, parts: BlockParts) -> str | None:
        """Why this is not a block as Llama's, with the weights of this package's linear layers; None if it is."""
        from attn_kernels_cpu.packed import PackedLinear

        attention, gated = parts.attention, parts.feed_forward
        if not all(
            isinstance(m, PackedLinear) for m in (attention.projections, attention.output, gated.both, gated.down)
        ):
            return "its weights are packed by another package"
        if gated.down.inputs % VECTOR:
            return f"the feed-forward's inner width {gated.down.inputs} is not a multiple of {VECTOR}"
        return refused_spec(attention.spec)

    def build(self, parts: BlockParts) -> BlockStep:
        """A `CpuBlockStep`."""
        from attn_kernels_cpu.block_step import CpuBlockStep

        return CpuBlockStep(parts)

    def stack(self, steps: Sequence[Any]) -> StackStep:
        """A `CpuStackStep`."""
        from attn_kernels_cpu.block_step import CpuStackStep

        return CpuStackStep(steps)


def refused_spec(spec: AttentionSpec) -> str | None:
    """Why this is not scaled dots, softmax and causal or windowed over heads of one size; None if it is."""
    heads = spec.heads
    said = {
        "score": spec.score.kind == "scaled_dot",
        "modifiers": not spec.modifiers,
        "distribution": spec.distribution.kind == "softmax",
        "norm of queries and keys": spec.norm is None,
        "source": not spec.cross,
        "mask": _plain_mask(spec),
        "unequal groups of heads": heads.per_group is not None,
        "sizes of heads": heads.key_size == heads.value_size and heads.key_size % VECTOR == 0,
        "size of heads": heads.key_size <= LARGEST_HEAD,
    }
    refused = [name for name, accepted in said.items() if not accepted]
    return f"its attention has another {refused[0]}" if refused else None


def _plain_mask(spec: AttentionSpec) -> bool:
    mask = spec.mask
    if isinstance(mask, Window):
        return mask.right == 0 and mask.dilation == 1
    return mask.kind == "causal"
