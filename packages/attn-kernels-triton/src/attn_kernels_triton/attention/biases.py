"""Learned biases of distances, as programs read them: one number for each head and distance."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from attn_core import AttentionSpec
from attn_core.modifiers import BiasTable
from torch import Tensor

LEAST = 16
"""Distances that every bias names: a number that is 1 would be a constant to Triton."""


def bias_of(spec: AttentionSpec, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The sum of all biases [heads, 2 far + 1], float32, for distances key - query from -far to far; None without any.

    Beyond, the last one holds. Gradients flow to the tables of the parameters.
    """
    learned = [modifier for modifier in spec.modifiers if isinstance(modifier, BiasTable)]
    if not learned:
        return None
    far = max(LEAST, *(modifier.far for modifier in learned))
    total: Tensor | None = None
    for modifier in learned:
        table = parameters[f"modifiers.{modifier.kind}.table"].float()
        found = table.t().contiguous()[:, buckets(modifier, far, table.device)]
        total = found if total is None else total + found
    return total


@lru_cache(64)
def buckets(modifier: BiasTable, far: int, device: torch.device) -> Tensor:
    """The bucket of every distance from -far to far, int64: the same in every step, so computed once."""
    # Made in an engine's step it serves training, too, which may not keep tensors of inference.
    with torch.inference_mode(mode=False):
        return modifier.bucket(torch.arange(-far, far + 1, device=device))
