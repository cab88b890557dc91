"""Attention kernels in PyTorch: the plain computation, PyTorch's fused attention, banded and block-sparse attention."""

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
"""Masks that can list the keys of a query, so that the scores of all other keys are skipped."""

MANY_KEYS = 1024
"""With more keys than this, choosing the plain computation, which holds all scores in memory, is logged."""

TABLED = (*SKIPPING, "full", "causal", "predicate", "dense", "tensor")
"""Masks that can be turned into a tensor with an entry for each pair."""


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
"""The conditions, except dtype and device, of kernels that take masks and biases as one tensor."""


class Plain(AttendKernel):
    """The plain computation: supports every call without varlen, holds all scores in memory, and is chosen last."""

    name = "plain"
    summary = "the reference computation in torch, with all scores in memory; accepts everything"
    accepts: ClassVar[Mapping[str, Condition]] = {
        field: Anything() for field in AttendProblem.defaults() if field != "varlen"
    }

    def cost(self, problem: AttendProblem) -> float:  # noqa: ARG002 -- the unit is the same for every problem
        """Always 1: costs are relative to this kernel."""
        return 1.0

    def remark(self, problem: AttendProblem) -> str | None:
        """A warning that all scores are held in memory, for more than `MANY_KEYS` keys; else None."""
        if problem.keys <= MANY_KEYS:
            return None
        parts = ", ".join([problem.mask, *problem.modifiers, problem.score, problem.distribution])
        return (
            f"the plain kernel holds the scores of all pairs in memory, of more than {MANY_KEYS} keys: no other kernel "
            f"here is cheaper for {parts} in {problem.dtype} on {problem.device}; attn explain shows the reasons"
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

        Masks that differ by head are built for all pairs of each head in every call, which takes longer than attention.
        """
        if problem.head_masks:
            return 0.8
        return 0.5 if problem.modifiers else 0.3

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.torch_sdpa.attend`."""
        from attn_variants.compute.torch_sdpa import attend

        return attend(spec, operands)


UNKNOWN_BAND = 0.4
"""The cost of `Banded` for unknown lengths, which may be shorter than the reach of a query."""
UNKNOWN_BAND_ELSEWHERE = 0.25
"""The cost of `Banded` for unknown lengths with given positions, for which no other kernel skips keys."""


def tile_of(reach: int) -> int:
    """The number of neighbouring queries in a tile, which share the keys within the reach of any of them."""
    return min(128, max(16, reach))


class Banded(AttendKernel):
    """Banded attention: the plain computation for tiles of neighbouring queries, over the keys within their reach.

    Time and memory are proportional to the length times the reach.
    """

    name = "banded"
    summary = "attention in torch by tiles of queries, each over the keys within the window"
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
        """The share of all pairs that the tiles contain, each slightly costlier than in `Plain`, plus a fixed part.

        Measured on one CPU core. A tenth is added, so that `BlockSparse` is preferred where both support the call.
        """
        pairs = problem.queries * problem.keys
        unknown = UNKNOWN_BAND_ELSEWHERE if problem.has_positions else UNKNOWN_BAND
        tile_keys = min(tile_of(problem.reach), problem.queries) + problem.reach
        return 0.1 + (1900 + 1.3 * problem.queries * tile_keys) / (1400 + pairs) if pairs else unknown

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.banded.attend`."""
        from attn_variants.compute.banded import attend

        return attend(spec, operands, tile_of(reach_of(spec.mask)))


UNKNOWN_SPARSE = 0.9
"""The cost of `BlockSparse` for unknown lengths, as the mask may allow all pairs."""


class BlockSparse(AttendKernel):
    """Block-sparse attention: each tile of neighbouring queries attends only to keys that some of them see.

    Time and memory grow with the number of allowed pairs: linearly in the length for windows.
    """

    name = "block_sparse"
    summary = "attention on CPUs by tiles of queries, each over only the keys that the mask allows"
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
        """The density of the mask, at twice the cost of a pair in PyTorch's fused attention, plus a fixed part.

        Measured on one CPU core; the fixed part equals the plain computation of 50 thousand pairs.
        """
        pairs = problem.queries * problem.keys
        return 0.02 + 0.6 * problem.density + 5e4 / pairs if pairs else UNKNOWN_SPARSE

    def run(self, spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
        """The output [batch, query, heads, value_size]; see `compute.block_sparse.attend`."""
        from attn_variants.compute.block_sparse.attend import attend

        return attend(spec, operands)
