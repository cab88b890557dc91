"""A linear recurrence all at once: every pair of tokens, time and memory quadratic in their number."""

from __future__ import annotations

import torch
from attn_core.kernels.recurrence import Steps
from torch import Tensor

from attn_variants.recurrences.pairs import faded_pairs


def parallel(steps: Steps) -> Tensor:
    """Outputs [batch, tokens, heads, value_size], from an empty memory."""
    return torch.matmul(effective_weights(steps), steps.value.transpose(1, 2)).transpose(1, 2)


def effective_weights(steps: Steps) -> Tensor:
    """The weights [batch, heads, query, key] of the values in the outputs; they may be negative and need not sum to 1.

    Additive: decayed products of queries and keys. By the delta rule: these times (I + A)^-1 diag(β), where A holds
    the decayed products of keys among themselves, times β (Yang et al. 2024, arXiv 2406.06484, §3.2).
    """
    query, key = steps.query.transpose(1, 2), steps.key.transpose(1, 2)
    faded = None if steps.decay is None else steps.decay.cumsum(1).transpose(1, 2)
    reach = faded_pairs(query, key, faded)
    if steps.strength is None:
        return reach
    strength = steps.strength.transpose(1, 2)
    overlap = strength[..., None] * faded_pairs(key, key, faded).tril(-1)
    # reach (I + overlap)^-1, as the solution X of X (I + overlap) = reach.
    solved: Tensor = torch.linalg.solve_triangular(overlap, reach, upper=False, left=False, unitriangular=True)
    weights: Tensor = solved * strength[..., None, :]
    return weights
