"""What the pieces of an attention have in common: learned weights, and matrix products of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attn_core.heads import Heads


@dataclass(frozen=True, kw_only=True)
class Part:
    """A score, a modifier, a distribution or a norm. `kind` is the word kernels accept or refuse.

    The `*_flops` methods count matrix products of all heads, two per multiply-add.
    """

    kind: ClassVar[str]

    def query_flops(self, heads: Heads) -> int:
        """Work per query token, before any key is met."""
        return 0

    def key_flops(self, heads: Heads) -> int:
        """Work per key token, before any query is met."""
        return 0

    def pair_flops(self, heads: Heads) -> int:
        """Work per pair of a query and a key."""
        return 0

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the learned weights by name; `Operands.parameters` holds them under the part's place."""
        return {}

    def parameters(self, heads: Heads) -> int:
        """Number of learned weights."""
        return sum(math.prod(shape) for shape in self.weights(heads).values())
