"""Attention that skips what nobody sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs, Kernel
from attn_core.kernels.base import Anything, Condition, OneOf, Problem

from attn_variants.kernels.masks import SKIPPING

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor

UNKNOWN = 0.9
"""The price where the lengths are not known: a mask may leave everything."""


class BlockSparse(Kernel):
    """Computes, for each tile of neighbouring queries, only the keys that some of them see.

    Time and memory grow with the pairs that are left: linearly in the length for windows.
    """

    name = "block_sparse"
    summary = "tiles of queries against the keys they see, and no others"
    accepts: ClassVar[Mapping[str, Condition]] = {
        "mask": OneOf(*SKIPPING),
        "key_size": Anything(),
        "value_size": Anything(),
        "query_heads": Anything(),
        "key_value_heads": Anything(),
        "head_masks": Anything(),
        "length_bound": Anything(),
        "padded": Anything(),
        "gradients": Anything(),
        "dtype": OneOf("float64", "float32", "bfloat16", "float16"),
        "device": OneOf("cpu"),
    }

    def cost(self, problem: Problem) -> float:
        """What is left of the pairs, at twice the price of a pair in torch's fused attention, and a fixed part.

        Measured on one CPU core; the fixed part is that of the plain computation of 50 thousand pairs.
        """
        pairs = problem.queries * problem.keys
        return 0.02 + 0.6 * problem.density + 5e4 / pairs if pairs else UNKNOWN

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.block_sparse.attend`."""
        from attn_variants.compute.block_sparse.attend import attend

        return attend(spec, operands)
