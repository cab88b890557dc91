"""Linear layers that read the same rows, such as those of queries, keys and values, which one product may compute.

Modules know which of their layers do, and whoever trains them knows when one product is worth it: on a GPU, say, where
weights are cast to bfloat16 once an update and may then lie side by side. Weights stay those of the separate layers, so
that nothing which reads, writes or updates them is told. For serving, layers are packed as one once and for all, see
`attn_core.kernels.linear.Pack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    Joins = Callable[[Tensor, Sequence[Any]], "list[Tensor] | None"]
    """Makes of rows [..., inputs] and layers the outputs [..., outputs] of each, or None where each is to be called."""
else:
    Joins = Any


class ReadsTogether(Protocol):
    """A module that has such layers, and gets what they make of its rows from `joint_outputs`."""

    joins: Joins | None
    """What computes them in one product where it can; None before somebody sets it."""

    def joint_layers(self) -> Sequence[nn.Linear]:
        """The layers, in the order in which `joint_outputs` gets them; none where each is read alone."""


def joint_outputs(rows: Tensor, layers: Sequence[Any], joins: Joins | None) -> list[Tensor]:
    """What each of these layers makes of rows [..., inputs]: [..., outputs], by one product where `joins` makes it."""
    found = None if joins is None else joins(rows, layers)
    return [layer(rows) for layer in layers] if found is None else found
