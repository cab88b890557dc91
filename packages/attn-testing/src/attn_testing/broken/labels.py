"""Broken in what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from attn_core import Cost, MechanismConfig, Shape
from attn_core.errors import InvalidValue
from torch import nn

from attn_testing.broken.sound import Sound


class NoEquation(Sound):
    """Breaks described: nobody knows what it computes."""

    equation = ""


class RefusesGroups(Sound):
    """Breaks settings: GROUPED is declared, and no grouped heads are taken."""

    def build(self, config: MechanismConfig) -> nn.Module:
        """A layer, unless heads share keys."""
        if config.key_value_heads not in {None, config.heads}:
            raise InvalidValue.of("key_value_heads", config.key_value_heads, f"{config.heads}")
        return super().build(config)


class Unchecked(Sound):
    """Breaks options: nobody looks at the temperature before it divides."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """A `temperature` that changes nothing."""

        temperature: float = 1.0

    def build(self, config: MechanismConfig) -> nn.Module:
        """A layer, unless it is so cold that it cannot be."""
        layer = super().build(config)
        layer.register_buffer("coldness", torch.tensor(1 / self.Config.of(config).temperature), persistent=False)
        return layer


class Cheap(Sound):
    """Breaks declared cost: the projections are free."""

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """The price without the projections."""
        sound = super().cost(config, shape)
        hidden = super().cost(config, replace(shape, query=0, key=0)).flops
        pairs = 4 * config.heads * config.head_layout.key_size * shape.batch * shape.query * shape.key
        return replace(sound, flops=hidden + pairs, allowed_flops=hidden)
