"""Auxiliary losses that layers compute in training passes, such as that of an indexer, for the training loop to add."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def recomputing() -> bool:
    """Whether activation checkpointing is running a forward pass again, within the backward pass.

    Such a pass must leave no trace in the layer. A compiler traces each pass once, and never again.
    """
    torch: Any = sys.modules["torch"]  # loaded by the caller; the contract itself needs no tensor library
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1  # noqa: SLF001 -- no public name


class KeepsAuxiliaryLoss:
    """Base class, beside `torch.nn.Module`, of modules that compute a loss in training passes."""

    _auxiliary_loss: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the loss, which belongs to the graph of one pass: copies have had no pass."""
        return {name: value for name, value in vars(self).items() if name != "_auxiliary_loss"}

    def keep_auxiliary_loss(self, loss: Tensor) -> None:
        """Store the scalar loss of a training pass; one that is computed again leaves nothing for the next update."""
        if not recomputing():
            self._auxiliary_loss = loss

    def take_auxiliary_loss(self) -> Tensor | None:
        """Return and clear the loss of the last training pass, a scalar; None if there is none."""
        taken, self._auxiliary_loss = self._auxiliary_loss, None
        return taken
