"""The declarations of attention over a paged KV cache on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core.batch import StaticRows
from attn_core.kernels.attend import BAND, LATENT, PagedAttendKernel, PagedAttendProblem, PagedAttentionInputs
from attn_core.kernels.base import Anything, AtMost, Condition, OneOf

from attn_kernels_triton.backends.attend import LEARNED, wide_biases
from attn_kernels_triton.backends.conditions import (
    LATENT_MODIFIERS,
    MAX_HEAD_DIM_LEARNED_BIAS,
    MODIFIERS,
    Computable,
    OnGpu,
)
from attn_kernels_triton.machine import absence, uncompilable

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor

GROUP = 32
"""The number of elements that share a scale in an int4 KV cache."""


class TritonPaged(PagedAttendKernel):
    """Attention over a paged KV cache, plain or quantized, read in place.

    The context of a request is split among programs, whose partial results are merged (split-KV).
    """

    name = "triton_paged"
    summary = "attention over a paged KV cache on a GPU, for decoding and prompt chunks, also in int8 and int4"
    graph_queries: ClassVar[int | None] = None
    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot", "dot"),
        "modifiers": MODIFIERS,
        "distribution": OneOf("softmax", "softmax_one", "sink"),
        "mask": OneOf(BAND),
        "key_size": AtMost(256),
        "value_size": AtMost(256),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "rows": OneOf("plain", "int8", "int4"),
        "dtype": Computable(OneOf("float32", "bfloat16", "float16")),
        "device": OnGpu(),
    }

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def unsupported(self, error: Exception) -> str | None:
        """Why Triton cannot compile or run a kernel on this GPU, if that is what the error means."""
        return uncompilable(error)

    def further_refusals(self, problem: PagedAttendProblem) -> list[str]:
        """Refuse head sizes that int4 groups do not divide, and learned biases for wide heads (too few registers)."""
        reasons = []
        learned = " and ".join(sorted(LEARNED.intersection(problem.modifiers)))
        if learned and max(problem.key_size, problem.value_size) > MAX_HEAD_DIM_LEARNED_BIAS:
            reasons.append(wide_biases(learned))
        if problem.rows == "int4":
            sizes = {"key_size": problem.key_size, "value_size": problem.value_size}
            wanted = f"is not a multiple of {GROUP}, which an int4 cache requires"
            reasons += [f"{field}: {size} {wanted}" for field, size in sizes.items() if size % GROUP]
        return reasons

    def cost(self, problem: PagedAttendProblem) -> float:
        """The time relative to the plain computation: rows are read once, without gathering them first."""
        return 0.1 if problem.rows == "plain" else 0.06

    def run(self, spec: AttentionSpec, operands: PagedAttentionInputs) -> Tensor:
        """The output [tokens, heads, value_size]; see `paged.attend`, and for `StaticRows` `paged.step`."""
        from attn_kernels_triton.paged.attend import attend_rows
        from attn_kernels_triton.paged.step import attend_step

        rows = operands.rows
        out: Tensor = attend_step(spec, operands, rows) if isinstance(rows, StaticRows) else attend_rows(spec, operands)
        return out


class TritonLatent(TritonPaged):
    """Absorbed multi-head latent attention (MLA) over a paged cache.

    Each latent is read once as the key and the value of all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    """

    name = "triton_latent"
    summary = "absorbed latent attention (MLA) over a paged KV cache on a GPU"
    # Prefill uses expanded keys and values: in the absorbed form each query-key pair costs several times as much.
    graph_queries = 1
    accepts: ClassVar[Mapping[str, Condition]] = {
        **TritonPaged.accepts,
        "modifiers": LATENT_MODIFIERS,
        "key_size": AtMost(1024),
        "value_size": AtMost(512),
        "key_value_heads": OneOf(1),
        "rows": OneOf(LATENT),
    }
