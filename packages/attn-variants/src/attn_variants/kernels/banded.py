"""Attention to neighbours, whatever the score and the distribution are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs, Kernel
from attn_core.kernels.base import Anything, AtLeast, Condition, OneOf, Problem

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor

UNKNOWN = 0.4
"""The price where the lengths are not known, which may be shorter than what a query reaches."""
UNKNOWN_PLACED = 0.25
"""The same where queries stand elsewhere, which no other kernel skips keys for."""


def tile_of(reach: int) -> int:
    """How many neighbouring queries meet the keys that any of them reaches, together."""
    return min(128, max(16, reach))


class Banded(Kernel):
    """The plain computation for tiles of neighbouring queries, each over the keys within their reach.

    Time and memory grow with the length times the reach.
    """

    name = "banded"
    summary = "the equation in torch, for tiles of queries over the keys within their reach"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "mask": OneOf("window", "composite"),
        "reach": AtLeast(1),
        "score": OneOf("scaled_dot", "dot", "general", "cosine", "additive", "concat", "location"),
        "modifiers": OneOf(
            "alibi", "soft_cap", "function", "t5_bias", "relative_bias", "relative_keys", "relative_values"
        ),
        "distribution": OneOf(
            "softmax",
            "softmax_one",
            "sink",
            "sigmoid",
            "sparsemax",
            "entmax",
            "adaptive_entmax",
            "hard",
            "stick_breaking",
        ),
        "key_size": Anything(),
        "value_size": Anything(),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "irregular_groups": Anything(),
        "padded": Anything(),
        "has_positions": Anything(),
        "gradients": Anything(),
        "dtype": OneOf("float64", "float32", "bfloat16", "float16"),
        "device": Anything(),
    }

    def cost(self, problem: Problem) -> float:
        """The pairs of tiles, a little dearer than plain ones, and a fixed part, as shares of all pairs.

        Measured on one CPU core. A tenth is added, so that fused attention over tiles goes first where it can.
        """
        pairs = problem.queries * problem.keys
        unknown = UNKNOWN_PLACED if problem.has_positions else UNKNOWN
        met = min(tile_of(problem.reach), problem.queries) + problem.reach
        return 0.1 + (1900 + 1.3 * problem.queries * met) / (1400 + pairs) if pairs else unknown

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.banded.attend`."""
        from attn_variants.compute.banded import attend

        return attend(spec, operands)
