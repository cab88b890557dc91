"""Broken in what it says of itself."""

from __future__ import annotations

from dataclasses import replace

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


class Cheap(Sound):
    """Breaks declared cost: the projections are free."""

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """The price without the projections."""
        sound = super().cost(config, shape)
        hidden = super().cost(config, replace(shape, query=0, key=0)).flops
        pairs = 4 * config.heads * config.head_layout.key_size * shape.batch * shape.query * shape.key
        return replace(sound, flops=hidden + pairs, allowed_flops=hidden)
