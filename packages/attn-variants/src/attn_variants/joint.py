"""Several projections of the same rows, computed as one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class JointProjection(nn.Module):
    """`whole` maps rows [..., inputs] to the outputs of several layers, `sizes` of each, side by side."""

    def __init__(self, whole: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.whole = whole
        self.sizes = list(sizes)

    def forward(self, rows: Tensor) -> list[Tensor]:
        """The outputs [..., size] of each layer."""
        return list(self.whole(rows).split(self.sizes, dim=-1))

    def parts(self) -> list[JointPart]:
        """A module for each layer, where one is wanted alone."""
        return [JointPart(self, place) for place in range(len(self.sizes))]


class JointPart(nn.Module):
    """One of the layers of a joint projection."""

    def __init__(self, joint: JointProjection, place: int) -> None:
        super().__init__()
        self.joint = joint
        self.place = place

    def forward(self, rows: Tensor) -> Tensor:
        """The outputs [..., size] of this layer alone; computes the others too."""
        parts: list[Tensor] = self.joint(rows)
        return parts[self.place]
