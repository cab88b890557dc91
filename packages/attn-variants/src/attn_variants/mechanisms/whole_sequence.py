"""The base class of mechanisms that need the whole sequence."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from attn_core import Capability, ComputedMechanism, Heads, MechanismConfig, Shape, Step

from attn_variants.mechanisms.common import BASIC

WHOLE_SEQUENCE = BASIC | frozenset({Capability.BIDIRECTIONAL, Capability.PADDING})
"""The capabilities of approximations that need a whole sequence at once."""


SHARED = 3
"""The number of projections if the queries are also the keys."""


class WholeSequence(ComputedMechanism):
    """Base class of mechanisms that are computed over whole sequences by a module between the projections."""

    projections = 4
    """The number of projection matrices, including the output."""

    @abstractmethod
    def attention(self, config: MechanismConfig) -> Any:
        """Build the module that computes attention between the projections; see `WholeLayer`."""

    def build(self, config: MechanismConfig) -> Any:
        """A new `WholeLayer`; raises the errors of `heads`."""
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
        """The number of heads, and the size of one."""
        return config.num_heads, config.head_layout.key_size

    def projected(self, config: MechanismConfig, shape: Shape | Step) -> int:
        """The FLOPs of the projections."""
        heads, size = self.inner_size(config)
        return 2 * shape.batch * shape.query * self.projections * config.hidden_size * heads * size

    def weights(self, config: MechanismConfig) -> int:
        """The number of parameters of the projections."""
        heads, size = self.inner_size(config)
        biases = (self.projections - 1) * heads * size + config.hidden_size if config.bias else 0
        return self.projections * config.hidden_size * heads * size + biases
