"""Linear layers of the same input, such as the query, key and value projections, computed as one matrix product.

A module declares which of its layers have the same input, and the trainer decides when one product is worth it: for
example on a GPU, where weights are cast to bfloat16 once per update and can then be concatenated. The parameters stay
those of the separate layers, so that optimizers and checkpoints are unaffected. For serving, layers are packed into one
permanently, see `attn_core.kernels.linear.Pack`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    Joins = Callable[[Tensor, Sequence[Any]], "list[Tensor] | None"]
    """Maps rows [..., inputs] and layers to the output [..., outputs] of each layer, or None to call each by itself."""
else:
    Joins = Any


class ReadsTogether(Protocol):
    """A module with linear layers of the same input, which it computes by `joint_outputs`."""

    joins: Joins | None
    """Computes the layers in one product where it can; None until the trainer sets it."""

    def joint_layers(self) -> Sequence[nn.Linear]:
        """The layers, in the order in which `joint_outputs` gets them; empty where each is computed by itself."""


def joint_outputs(rows: Tensor, layers: Sequence[Any], joins: Joins | None) -> list[Tensor]:
    """The outputs [..., outputs] of these layers for rows [..., inputs], in one product where `joins` supports it."""
    found = None if joins is None else joins(rows, layers)
    return [layer(rows) for layer in layers] if found is None else found


def weight_of(linear: nn.Linear) -> Tensor:
    """The matrix [outputs, inputs] of a linear layer, including its active adapter (`adapted_weight`), if any.

    For code that uses the matrix without calling the layer, which a module lists in `read_weights`.
    """
    adapted: Callable[[], Tensor] | None = getattr(linear, "adapted_weight", None)
    return linear.weight if adapted is None else adapted()
