"""Code that torch.compile does not trace: an operator for the weights that dropout keeps, and a graph break.

This is a separate module because operators and `torch.compiler.disable` import what only compiling processes need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attn_core import AttentionInputs
from attn_core.dropout import Dropout
from torch import Tensor

from attn_variants.compute.dropout import kept_weights


def kept_in_graph(dropout: Dropout, weights: Tensor) -> Tensor:
    """Like `kept_weights`, with the same result for the same seed, as a single operator in a compiled graph.

    If it were traced, the compiler would recompute every round of random numbers for each use of its result.
    """
    seed = torch.as_tensor(dropout.signed_seed, dtype=torch.int64, device="cpu")
    kept: Tensor = kept_by_seed(weights.detach(), seed, dropout.probability, [dropout.offset, dropout.first])
    return kept


@torch.library.custom_op("attn_variants::kept_by_seed", mutates_args=())
def kept_by_seed(like: Tensor, seed: Tensor, probability: float, counted: Sequence[int]) -> Tensor:
    """Bool, True for weights to keep, shaped as `like`; `seed` [], int64, on the CPU; `counted`: offset and first."""
    offset, first = counted
    found = Dropout(probability=probability, seed=int(seed) % (1 << 64), offset=offset, first=first)
    return kept_weights(found, like)


@kept_by_seed.register_fake
def _(like: Tensor, _seed: Tensor, _probability: float, _counted: Sequence[int]) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(run: Callable[[AttentionInputs], Tensor], operands: AttentionInputs) -> Tensor:
    """Call `run` outside compiled graphs, with a graph break before and after."""
    return run(operands)
