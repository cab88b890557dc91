"""The declaration of fused softmax attention on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs
from attn_core.kernels.attend import AttendProblem
from attn_core.kernels.base import Anything, AtMost, Condition, OneOf

from attn_kernels_triton.backends.conditions import (
    MAX_HEAD_DIM_DROPOUT,
    MAX_HEAD_DIM_LEARNED_BIAS,
    MODIFIERS,
    Computable,
    OnGpu,
)
from attn_kernels_triton.in_graph import InGraph
from attn_kernels_triton.machine import absence, uncompilable

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor


LEARNED = {"t5_bias", "relative_bias"}
BIASED_MASKS = {"full", "causal", "window"}
"""The masks that can be combined with learned biases: the kernels have enough registers for both."""


class TritonAttend(InGraph):
    """Fused attention that never materializes the scores.

    Tiles that are masked entirely are skipped, and tiles without masked pairs are computed without mask checks.
    """

    name = "triton_attend"
    summary = "fused attention on a GPU, any mask, with gradients"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "score": OneOf("scaled_dot", "dot"),
        "modifiers": MODIFIERS,
        "distribution": OneOf("softmax", "softmax_one", "sink"),
        "mask": Anything(),
        "key_size": AtMost(256),
        "value_size": AtMost(256),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "head_masks": Anything(),
        "length_bound": Anything(),
        "padded": Anything(),
        "has_positions": Anything(),
        "kv_unordered": Anything(),
        "varlen": Anything(),
        "dropout": Anything(),
        "gradients": Anything(),
        "dtype": Computable(OneOf("float32", "bfloat16", "float16")),
        "device": OnGpu(),
    }

    def available(self) -> str | None:
        """Why it cannot run on this machine, or None if it can."""
        return absence()

    def further_refusals(self, problem: AttendProblem) -> list[str]:
        """Refuse combinations of features and head sizes for which the kernels have too few registers."""
        reasons = []
        if problem.dropout and max(problem.key_size, problem.value_size) > MAX_HEAD_DIM_DROPOUT:
            reasons.append(
                f"dropout: supported for head sizes up to {MAX_HEAD_DIM_DROPOUT}; larger ones need too many registers"
            )
        learned = " and ".join(sorted(LEARNED.intersection(problem.modifiers)))
        return reasons + (biased_refusals(learned, problem) if learned else [])

    def cost(self, problem: AttendProblem) -> float:
        """An estimate: the pairs that are not masked, each at a fifth of the plain computation's time.

        The plain computation writes and reads every score, which on a GPU takes nearly all of its time.
        """
        return 0.02 + 0.18 * problem.density

    def unsupported(self, error: Exception) -> str | None:
        """Why Triton cannot compile or run a kernel on this GPU, if that is what the error means."""
        return uncompilable(error)

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `attention.attend`."""
        from attn_kernels_triton.attention.attend import attend

        out: Tensor = attend(spec, operands)
        return out


def biased_refusals(learned: str, problem: AttendProblem) -> list[str]:
    """Why learned biases of these names are refused.

    Their gradients are summed by distance, so they cannot be combined with explicit positions.
    """
    reasons = []
    if problem.gradients and problem.has_positions:
        reasons.append(f"gradients: of {learned} are not supported with explicit positions")
    if max(problem.key_size, problem.value_size) > MAX_HEAD_DIM_LEARNED_BIAS:
        reasons.append(wide_biases(learned))
    if problem.mask not in BIASED_MASKS:
        supported = ", ".join(sorted(BIASED_MASKS))
        reasons.append(f"mask: {problem.mask!r} cannot be combined with {learned}; masks that can: {supported}")
    if problem.dropout:
        reasons.append(f"dropout: cannot be combined with {learned}; both together need too many registers")
    return reasons


def wide_biases(learned: str) -> str:
    """Why learned biases of these names are refused for wide heads."""
    return f"modifiers: {learned}: head sizes above {MAX_HEAD_DIM_LEARNED_BIAS} need too many registers"
