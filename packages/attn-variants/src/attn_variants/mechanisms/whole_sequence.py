"""What mechanisms that need the whole sequence share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from attn_core import Capability, ComputedMechanism, Heads, MechanismConfig, Shape, Step

from attn_variants.mechanisms.common import BASIC

WHOLE_SEQUENCE = BASIC | frozenset({Capability.BIDIRECTIONAL, Capability.PADDING})
"""Of approximations that see a whole sequence at once."""


SHARED = 3
"""Projections where queries are keys too."""


class WholeSequence(ComputedMechanism):
    """A mechanism without a causal form: what a token may see depends on all tokens."""

    projections = 4
    """The number of projection matrices, that of the output included."""

    @abstractmethod
    def attention(self, config: MechanismConfig) -> Any:
        """A fresh module that computes what lies between the projections; see `WholeLayer`."""

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `WholeLayer`; raises as `heads` does."""
        from attn_variants.mechanisms.whole_sequence_layer import WholeLayer

        heads = self.heads(config)
        inner = self.attention(config)
        return WholeLayer(
            inner, heads, hidden_size=config.hidden_size, bias=config.bias, shared=self.projections == SHARED
        )

    def heads(self, config: MechanismConfig) -> Heads:
        """The heads of a config."""
        return config.head_layout

    def inner_size(self, config: MechanismConfig) -> tuple[int, int]:
        """Heads and the elements of one."""
        return config.num_heads, config.head_layout.key_size

    def projected(self, config: MechanismConfig, shape: Shape | Step) -> int:
        """FLOPs of the projections."""
        heads, size = self.inner_size(config)
        return 2 * shape.batch * shape.query * self.projections * config.hidden_size * heads * size

    def weights(self, config: MechanismConfig) -> int:
        """Parameters of the projections."""
        heads, size = self.inner_size(config)
        biases = (self.projections - 1) * heads * size + config.hidden_size if config.bias else 0
        return self.projections * config.hidden_size * heads * size + biases
