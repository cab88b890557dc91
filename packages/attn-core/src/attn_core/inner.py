"""What a mechanism puts between its projections and its output, where its spec alone does not say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attn_core.batch import Fields
from attn_core.errors import Incompatible
from attn_core.kernel import Operands

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Attend = Callable[[Operands], Tensor]
"""The spec over given operands: outputs [batch, query, heads, value_size], or weights [batch, heads, query, key]."""


class InnerAttention:
    """Base, beside `torch.nn.Module`, of the module that `DeclaredMechanism.inner` builds.

    The layer of the spec projects rows to queries, keys and values, turns them to their positions, remembers them
    from step to step and projects what comes out; the inner module only has a method

        forward(rows, operands, attend) -> [batch, query, ...]

    `rows` [batch, query, width] are the inputs that the queries come from, `operands` what they meet, and
    `attend(operands)` is the spec's own attention through whichever kernel fits. The last axes of the result have
    heads x value_size elements in all.
    """

    def remember(self, rows: Tensor) -> Fields:  # noqa: ARG002 -- most remember keys and values only
        """Further fields [batch, key, ...] of rows [batch, key, width], found again in `Operands.fields`.

        Their shapes are those of `DeclaredMechanism.further_fields`.
        """
        return {}

    def weights(self, rows: Tensor, operands: Operands, attend: Attend) -> Tensor:  # noqa: ARG002 -- as overrides have it
        """Attention weights [batch, heads, query, key]; here `attend(operands)` gives the spec's own."""
        raise Incompatible(f"{type(self).__name__} has no attention weights")
