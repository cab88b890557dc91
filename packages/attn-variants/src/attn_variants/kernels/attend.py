"""The kernels of attention in torch: the plain computation, torch's fused attention, bands and block-sparse tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from attn_core import AttentionInputs
from attn_core.kernels.attend import AttendKernel, AttendProblem, reach_of
from attn_core.kernels.base import Anything, AtLeast, Condition, OneOf

if TYPE_CHECKING:
    from attn_core import AttentionSpec
    from torch import Tensor

SKIPPING = (
    "window",
    "composite",
    "prefix",
    "global",
    "strided",
    "fixed",
    "big_bird",
    "blocks",
    "neighbourhood",
    "segments",
    "chunk_ring",
    "chunked",
    "tree",
    "graph",
    "per_head",
)
"""Masks that name the keys of a query, so that the others are never met."""

MANY_KEYS = 1024
"""Keys from above which the plain computation, which keeps all scores, is not chosen without a word in the log."""

TABLED = (*SKIPPING, "full", "causal", "predicate", "dense", "tensor")
"""Masks whose pairs become a tensor."""


TABLES: Mapping[str, Condition] = {
    "score": OneOf("scaled_dot", "dot"),
    "modifiers": OneOf("alibi", "t5_bias", "relative_bias", "tensor_bias"),
    "distribution": OneOf("softmax", "softmax_one", "sink"),
    "mask": OneOf(*TABLED),
    "key_size": Anything(),
    "value_size": Anything(),
    "query_heads": Anything(),
    "key_value_heads": Anything(),
    "head_masks": Anything(),
    "length_bound": Anything(),
    "padded": Anything(),
    "has_positions": Anything(),
    "kv_unordered": Anything(),
    "gradients": Anything(),
}
"""What kernels accept that are given a tensor of masks and biases, beside types of elements and devices."""


class Plain(AttendKernel):
    """Accepts every `attend` of one text a row, keeps all scores in memory and is chosen last."""

    name = "plain"
    summary = "the equation in torch; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {
        field: Anything() for field in AttendProblem.defaults() if field != "varlen"
    }

    def cost(self, problem: AttendProblem) -> float:  # noqa: ARG002 -- the unit is the same for every problem
        """The unit of all costs."""
        return 1.0

    def remark(self, problem: AttendProblem) -> str | None:
        """That all scores are kept, where there are many."""
        if problem.keys <= MANY_KEYS:
            return None
        parts = ", ".join([problem.mask, *problem.modifiers, problem.score, problem.distribution])
        return (
            f"plain computes over more than {MANY_KEYS} keys, and keeps the scores of all pairs: of the other kernels "
            f"here none is cheaper for {parts} in {problem.dtype} on {problem.device}; attn explain says why"
        )

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.plain.attend`."""
        from attn_variants.compute.plain import attend

        return attend(spec, operands)


class TorchSdpa(AttendKernel):
    """`torch.nn.functional.scaled_dot_product_attention`: never holds all scores of a causal call in memory."""

    name = "torch_sdpa"
    summary = "torch's fused scaled dot-product attention"
    accepts: ClassVar[Mapping[str, Condition]] = {
        **TABLES,
        "dtype": OneOf("float64", "float32", "bfloat16", "float16"),
        "device": OneOf("cpu", "mps"),
    }

    def cost(self, problem: AttendProblem) -> float:
        """Measured on two CPU cores: a third to a fifth of the plain time, near half with a tensor of biases.

        Masks that differ by head are made for all pairs of each at every call, which takes longer than the attention.
        """
        if problem.head_masks:
            return 0.8
        return 0.5 if problem.modifiers else 0.3

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.torch_sdpa.attend`."""
        from attn_variants.compute.torch_sdpa import attend

        return attend(spec, operands)


UNKNOWN_BAND = 0.4
"""The price where the lengths are not known, which may be shorter than what a query reaches."""
UNKNOWN_BAND_ELSEWHERE = 0.25
"""The same where queries stand elsewhere, which no other kernel skips keys for."""


def tile_of(reach: int) -> int:
    """How many neighbouring queries meet the keys that any of them reaches, together."""
    return min(128, max(16, reach))


class Banded(AttendKernel):
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

    def cost(self, problem: AttendProblem) -> float:
        """The pairs of tiles, a little dearer than plain ones, and a fixed part, as shares of all pairs.

        Measured on one CPU core. A tenth is added, so that fused attention over tiles goes first where it can.
        """
        pairs = problem.queries * problem.keys
        unknown = UNKNOWN_BAND_ELSEWHERE if problem.has_positions else UNKNOWN_BAND
        met = min(tile_of(problem.reach), problem.queries) + problem.reach
        return 0.1 + (1900 + 1.3 * problem.queries * met) / (1400 + pairs) if pairs else unknown

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.banded.attend`."""
        from attn_variants.compute.banded import attend

        return attend(spec, operands, tile_of(reach_of(spec.mask)))


UNKNOWN_SPARSE = 0.9
"""The price where the lengths are not known: a mask may leave everything."""


class BlockSparse(AttendKernel):
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

    def cost(self, problem: AttendProblem) -> float:
        """What is left of the pairs, at twice the price of a pair in torch's fused attention, and a fixed part.

        Measured on one CPU core; the fixed part is that of the plain computation of 50 thousand pairs.
        """
        pairs = problem.queries * problem.keys
        return 0.02 + 0.6 * problem.density + 5e4 / pairs if pairs else UNKNOWN_SPARSE

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.block_sparse.attend`."""
        from attn_variants.compute.block_sparse.attend import attend

        return attend(spec, operands)
