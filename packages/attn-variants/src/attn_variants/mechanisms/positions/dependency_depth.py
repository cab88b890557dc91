"""Depths in the tree of a sentence as positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, Cost, DeclaredMechanism, MechanismConfig, Paper, Shape
from attn_core.modifiers import DependencyTree

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.positions.dependency import parse_of


class DependencyDepthAttention(DeclaredMechanism):
    """Inputs are given their position and their depth in a parse, as sinusoids that a learned map fuses.

    The parse counts positions from the start of a sequence. Tokens behind it depend on the one before them each.
    """

    name = "dependency_depth"
    summary = "position and depth in a dependency tree are fused and added to the inputs"
    paper = Paper(
        title="Self-Attention with Structural Position Representations",
        authors="Wang et al.",
        year=2019,
        arxiv="1909.00383",
    )
    equation = (
        r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V \text{ of }"
        r" x_i + \tanh(U\, \mathrm{PE}(i) + W\, \mathrm{PE}(\delta_i)),\quad"
        r" \delta_i = \text{steps from } i \text{ to the root}"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`parse`, for each token the one that it depends on, -1 for the root; none is a chain."""

        parse: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "parse", parse_of(self.parse))

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config), rotary=config.rotary)

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `DepthLayer` with random weights."""
        from attn_variants.places.depth_layer import DepthLayer
        from attn_variants.spec_layer import SpecLayer

        attention = SpecLayer(
            self.spec(config),
            width=config.width,
            bias=config.bias,
            borrows=config.borrows,
            dropout=config.dropout,
        )
        return DepthLayer(attention, DependencyTree(self.Config.of(config).parse), width=config.width)

    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """As declared, and two products by [width, width] matrices for every position that is new."""
        fused = 2 * config.width**2
        places = Cost(flops=2 * shape.query * fused, allowed_flops=2 * shape.query * fused, parameters=fused)
        return super().cost(config, shape) + places
