"""Attention of the softmax family on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import Anything, AtMost, Condition, Kernel, OneOf, Operands, Problem

from attn_kernels_triton.kernels.conditions import InOrder, OnGpu
from attn_kernels_triton.machine import absence

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


class TritonAttend(Kernel):
    """Never holds the scores; skips what nobody sees, and does not ask where everything is seen."""

    name = "triton_attend"
    summary = "fused attention on a GPU, any mask, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot", "dot"),
        "modifiers": InOrder(("soft_cap", "alibi")),
        "distribution": OneOf("softmax", "softmax_one", "sink"),
        "mask": Anything(),
        "key_size": AtMost(256),
        "value_size": AtMost(256),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "head_masks": Anything(),
        "length_bound": Anything(),
        "padded": Anything(),
        "placed": Anything(),
        "scattered": Anything(),
        "gradients": Anything(),
        "dtype": OneOf("float32", "bfloat16", "float16"),
        "device": OnGpu(),
    }

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def cost(self, problem: Problem) -> float:
        """What is left of the pairs, at a fifth of the plain computation's time for each.

        An estimate: the plain computation writes and reads every score, which on a GPU is all of its time.
        """
        return 0.02 + 0.18 * problem.density

    def run(self, spec: AttentionSpec, operands: Operands) -> Tensor:
        """The output [batch, query, heads, value_size]; see `attention.attend`."""
        from attn_kernels_triton.attention.attend import attend

        out: Tensor = attend(spec, operands)
        return out
