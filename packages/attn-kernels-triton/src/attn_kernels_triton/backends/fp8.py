"""The declaration of attention in FP8 on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs
from attn_core.kernels.attend import AttendKernel, AttendProblem
from attn_core.kernels.base import Anything, AtMost, Condition, OneOf

from attn_kernels_triton.backends.conditions import Computable, OnGpu
from attn_kernels_triton.machine import absence

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


class TritonFp8(AttendKernel):
    """Fused attention in FP8: quantizes rotated queries and keys, and values, to e4m3, which doubles the peak rate of
    the tensor cores."""

    name = "triton_fp8"
    summary = "fused attention on a GPU in 8 bits, without gradients"
    alters = "rounds queries, keys, values and weights to 8 bits"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot", "dot"),
        "distribution": OneOf("softmax", "softmax_one", "sink"),
        "mask": OneOf("full", "causal", "window"),
        "key_size": AtMost(256),
        "value_size": AtMost(256),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "dtype": Computable(OneOf("bfloat16", "float16")),
        "device": OnGpu(),
    }

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def cost(self, problem: AttendProblem) -> float:
        """An estimate: matrix products take half the time of those in 16 bits, everything else the same."""
        return 0.015 + 0.13 * problem.density

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `fp8.attend`."""
        from attn_kernels_triton.fp8 import attend

        out: Tensor = attend(spec, operands)
        return out
