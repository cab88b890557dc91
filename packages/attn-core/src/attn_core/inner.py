"""The module inside the layer of a spec, which computes what the spec alone does not describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.batch import Fields, RaggedBatch, RowsInPlace
from attn_core.errors import Incompatible
from attn_core.kernels.attend import AttentionInputs

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Attend = Callable[[AttentionInputs], Tensor]
"""Applies a spec to inputs; gives outputs [batch, query, heads, value_size], or weights [batch, heads, query, key]."""

PLAIN = "plain"
"""The name that every layer takes: attention of its spec by the reference computation, the rest as without a name."""


class InnerAttention:
    """Base class, beside `torch.nn.Module`, of the module that `DeclaredMechanism.inner` builds.

    The layer of the spec projects hidden states to queries, keys and values, applies rotary positions, caches keys and
    values between steps and applies the output projection. The inner module only needs a method

        forward(rows, operands, attend) -> [batch, query, ...]

    `rows` [batch, query, width] are the hidden states of the queries, `operands` the projected queries, keys and
    values, and `attend(operands)` computes the spec's attention with whichever kernel fits. The last axes of the
    result have heads x value_size elements in all. A module with attention that `attend` does not compute says so by
    `computes_itself`, or overrides `use_kernel` to select kernels for it.
    """

    computes_itself: ClassVar[bool] = False
    reads_rows: ClassVar[bool] = True
    """False if only the operands change the result, so that the module can attend where there are no hidden states."""

    def use_kernel(self, name: str | None) -> None:
        """Use the kernel of this name for attention that `attend` does not compute; None lets the module choose.

        Raises `Incompatible` where there is such attention and no kernel can be selected for it.
        """
        if self.computes_itself:
            require_plain(name, type(self).__name__)

    def remember(self, rows: Tensor, positions: Tensor) -> Fields:  # noqa: ARG002 -- most remember nothing
        """Fields [..., key, ...] to cache for hidden states [..., key, width] at `positions` [key] besides keys and
        values.

        Their shapes are those of `DeclaredMechanism.further_fields`; `AttentionInputs.fields` has them later.
        """
        return {}

    def decode(self, rows: Tensor, query: Tensor, batch: RaggedBatch, cached: RowsInPlace) -> Tensor | None:  # noqa: ARG002
        """Outputs [requests, heads, value_size] of a decode step that reads only some of the cached rows, in place.

        `rows` [requests, width] and `query` [requests, heads, key_size] are those of the new token of each request,
        whose fields are cached. None, as here: all rows are gathered, and `forward` computes the step.
        """
        return None

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:  # noqa: ARG002 -- as overridden
        """Attention weights [batch, heads, query, key]; here `attend(operands)` returns the weights of the spec."""
        raise Incompatible(f"{type(self).__name__} has no attention weights")


def require_plain(name: str | None, who: str) -> None:
    """Raise `Incompatible` for the name of a kernel that `who`, with a computation of its own, would not use."""
    if name not in {None, PLAIN}:
        message = f"{who} computes its attention itself: kernel {name!r} cannot be selected, only {PLAIN!r}"
        raise Incompatible(message, kernel=name)
