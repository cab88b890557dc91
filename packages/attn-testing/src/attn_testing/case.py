"""One configuration of a mechanism, with what a law needs to try it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from attn_core import Capability, Mechanism, MechanismConfig, StateSpecs
from torch import Tensor

from attn_testing.memory import rounding

JITTER = 0.1
"""Added to fresh weights, so that nothing that starts at zero stays untested."""


@dataclass(frozen=True, eq=False)
class Case:
    """A mechanism at the config of one setting; layers and inputs are float64 unless a law asks for less."""

    mechanism: Mechanism
    config: MechanismConfig
    setting: Mapping[str, Any]
    label: str

    @cached_property
    def layer(self) -> Any:
        """The layer that most laws share; they do not change it."""
        return self.build()

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
        """A layer of its own, with weights drawn from `seed`, in evaluation mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layer = self.mechanism.build(self.config).double()
            with torch.no_grad():
                for weight in layer.parameters():
                    weight.add_(JITTER * torch.randn_like(weight))
        return layer.eval().to(dtype)

    def rows(self, *shape: int, seed: int = 1) -> Tensor:
        """Random inputs [*shape, width], float64, N(0, 1), from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, self.config.width, generator=generator, dtype=torch.float64)

    @property
    def cross(self) -> bool:
        """Whether the layer attends to a source."""
        return self.mechanism.can(Capability.CROSS)

    @property
    def causal(self) -> bool:
        """Whether no output may depend on a later input."""
        return self.mechanism.can(Capability.CAUSAL) and self.config.causal

    @property
    def specs(self) -> StateSpecs:
        """What the layer remembers between steps."""
        return self.mechanism.state(self.config)

    @property
    def tolerance(self) -> float:
        """What two float64 computations of one thing may differ by: rounding, or that of states kept in fewer bits."""
        return rounding([self.specs])

    def attend(
        self, query: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None, layer: Any = None
    ) -> Any:
        """The outputs [batch, query, width]; `source` and `key_padding_mask` reach only layers that were given them."""
        called = self.layer if layer is None else layer
        return called(
            query, *self._extra(source), **({} if key_padding_mask is None else {"key_padding_mask": key_padding_mask})
        )

    def weights(self, query: Tensor, source: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Any:
        """The weights [batch, heads, query, key]."""
        return self.layer.weights(
            query, *self._extra(source), **({} if key_padding_mask is None else {"key_padding_mask": key_padding_mask})
        )

    def source(self, *shape: int, seed: int = 2) -> Tensor | None:
        """Random source rows [*shape, width] where the layer attends to a source, else None."""
        return self.rows(*shape, seed=seed) if self.cross else None

    def _extra(self, source: Tensor | None) -> tuple[Tensor, ...]:
        return () if source is None else (source,)
