"""What torch.compile does not look into: which weights dropout keeps, an operator, and what runs between two graphs.

This is a module of its own because operators and `torch.compiler.disable` load what only compiling processes need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attn_core import AttentionInputs
from attn_core.dropout import Dropout
from torch import Tensor

from attn_variants.compute.dropout import kept_weights


def kept_in_graph(dropout: Dropout, weights: Tensor) -> Tensor:
    """Which weights [batch, heads, query, key] are kept, bool: those that `kept_weights` says for the same seed.

    As torch's own operations, every round of random numbers would be computed anew for each use of the one before.
    """
    seed = torch.as_tensor(dropout.signed_seed, dtype=torch.int64, device="cpu")
    kept: Tensor = kept_by_seed(weights.detach(), seed, dropout.probability, [dropout.offset, dropout.first])
    return kept


@torch.library.custom_op("attn_variants::kept_by_seed", mutates_args=())
def kept_by_seed(like: Tensor, seed: Tensor, probability: float, counted: Sequence[int]) -> Tensor:
    """Which of weights `like` these are kept, bool; `seed` [], int64, on the CPU; `counted` are offset and first."""
    offset, first = counted
    found = Dropout(probability=probability, seed=int(seed) % (1 << 64), offset=offset, first=first)
    return kept_weights(found, like)


@kept_by_seed.register_fake
def _(like: Tensor, _seed: Tensor, _probability: float, _counted: Sequence[int]) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.bool)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncompiled(run: Callable[[AttentionInputs], Tensor], operands: AttentionInputs) -> Tensor:
    """What `run` computes of operands, between two graphs."""
    return run(operands)
