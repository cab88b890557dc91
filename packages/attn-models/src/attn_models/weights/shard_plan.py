"""Which tensors go into which safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_models.weights.shards import WEIGHTS_NAME

SHARD_BYTES = 1 << 30
"""Bytes of a shard, unless one tensor alone is larger; bounds the memory of a conversion."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """File names, each with the names of its tensors, and the bytes of all tensors together."""

    files: dict[str, list[str]]
    total_bytes: int

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor."""
        return {tensor: file for file, tensors in self.files.items() for tensor in tensors}


def plan_shards(sizes: Mapping[str, int], limit: int = SHARD_BYTES) -> ShardPlan:
    """Tensors in the order of `sizes` (name -> bytes), filled into shards of at most `limit` bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    total = sum(sizes.values())
    if len(groups) == 1:
        return ShardPlan({WEIGHTS_NAME: groups[0]}, total)
    count = len(groups)
    return ShardPlan({f"model-{n:05}-of-{count:05}.safetensors": group for n, group in enumerate(groups, 1)}, total)
