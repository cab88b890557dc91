"""The adapter of one layer: two low-rank matrices, and with DoRA a magnitude."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_models.lora.sites import LoraSite


class LoraLayer(nn.Module):
    """The LoRA term `scaling` B A x of one layer (arXiv 2106.09685, section 4.1): A [rank, inputs], B [outputs, rank].

    With a `magnitude` m [outputs], the layer's output is m (W x + scaling B A x) / |W + scaling B A|, norms taken over
    the inputs of each output and held constant in backward passes (DoRA, arXiv 2402.09353, equations 5 and 11).
    """

    def __init__(self, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.magnitude = None if magnitude is None else nn.Parameter(magnitude)
        self.scaling = scaling
        self.dropout = 0.0
        self._norm: Tensor | None = None

    def product(self, rows: Tensor) -> Tensor:
        """The low-rank product `scaling` B A x [..., outputs] for `rows` [..., inputs]."""
        if self.dropout and self.training:
            rows = functional.dropout(rows, self.dropout)
        low = functional.linear(rows.to(self.a.dtype), self.a)
        # Scaled where it is narrow.
        return functional.linear(low * self.scaling, self.b).to(rows.dtype)

    def change(self, rows: Tensor, out: Tensor, site: LoraSite) -> Tensor:
        """The term to add to the layer's output `out` [..., outputs] for `rows` [..., inputs]."""
        added = self.product(rows)
        if self.magnitude is None:
            return added
        scale = (self.magnitude / self.norm(site)).to(out.dtype)
        bias = site.bias()
        plain = out if bias is None else out - bias.to(out.dtype)
        return (scale - 1) * plain + scale * added

    def norm(self, site: LoraSite) -> Tensor:
        """|W + scaling B A| [outputs]; computed once outside of training."""
        if self._norm is not None:
            return self._norm
        with torch.no_grad():
            norm: Tensor = (site.weight() + self.delta()).norm(dim=1)
        self._norm = None if self.training else norm
        return norm

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 -- as torch has it
        """As in torch; what training changes is computed again."""
        self._norm = None
        return super().train(mode)

    def delta(self) -> Tensor:
        """scaling B A [outputs, inputs]."""
        return self.scaling * (self.b @ self.a)

    def over(self, weight: Tensor) -> Tensor:
        """W + scaling B A [outputs, inputs]."""
        return weight + self.delta().to(weight.dtype)

    def merged(self, site: LoraSite) -> Tensor:
        """The weight [outputs, inputs] of the layer with the adapter merged into it."""
        changed = site.weight() + self.delta()
        if self.magnitude is None:
            return changed
        return (self.magnitude / self.norm(site))[:, None] * changed
