"""Positions that queries, keys and values are given, each by itself."""

from __future__ import annotations

import dataclasses
from typing import Any

from attn_core import AttentionSpec, Capability, DeclaredMechanism, Heads, MechanismConfig, Paper
from attn_core.errors import Incompatible

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask

COURSE = Paper(title="CS224N, Note 10: Self-Attention and Transformers", authors="Hewitt", year=2023)


class AddedPositions(DeclaredMechanism):
    """Sinusoids are added to queries, keys and values after their projections, in every head."""

    name = "positions_added"
    summary = "sinusoids are added to queries, keys and values"
    paper = COURSE
    equation = (
        r"o_i = \sum_j \alpha_{ij} (v_j + p_j),\quad"
        r" e_{ij} = \frac{(q_i + p_i)^\top (k_j + p_j)}{\sqrt{d_k}},\quad"
        r" p_{i,2m} = \sin(i\, 10000^{-2m/d_k}),\quad p_{i,2m+1} = \cos(i\, 10000^{-2m/d_k})"
    )
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where key/value heads do not divide the heads, `Incompatible` for rotary positions."""
        refuse_rotary(self.name, config)
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config))

    def paged_computation(self, config: MechanismConfig) -> None:
        """None: rows are remembered without positions, which must be given before they are met."""

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `AddedPlaces` with random weights."""
        from attn_variants.places.layer import AddedPlaces

        return AddedPlaces(
            self.spec(config),
            width=config.width,
            bias=config.bias,
            borrows=config.borrows,
            dropout=config.dropout,
        )


class ConcatenatedPositions(DeclaredMechanism):
    """Sinusoids of the size of a head stand behind queries, keys and values, so that contents and positions meet
    apart: the score is the sum of both products. What is remembered is as small as without positions."""

    name = "positions_concatenated"
    summary = "sinusoids stand behind queries, keys and values"
    paper = COURSE
    equation = (
        r"o_i = \sum_j \alpha_{ij} [v_j; p_j],\quad"
        r" e_{ij} = \frac{q_i^\top k_j + p_i^\top p_j}{\sqrt{2 d_k}},\quad"
        r" p_{i,2m} = \sin(i\, 10000^{-2m/d_k}),\quad p_{i,2m+1} = \cos(i\, 10000^{-2m/d_k})"
    )
    capabilities = GROUPED_SELF - {Capability.ROTARY}

    def projected(self, config: MechanismConfig) -> Heads:
        """The heads without positions."""
        return config.head_layout

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where key/value heads do not divide the heads, `Incompatible` for rotary positions."""
        refuse_rotary(self.name, config)
        own = self.projected(config)
        heads = dataclasses.replace(own, key_size=2 * own.key_size, value_size=2 * own.value_size)
        return AttentionSpec(heads=heads, mask=self_mask(config))

    def paged_computation(self, config: MechanismConfig) -> None:
        """None: rows are remembered without positions, which must be given before they are met."""

    drops_weights = True

    def build(self, config: MechanismConfig) -> Any:
        """A fresh `ConcatenatedPlaces` with random weights."""
        from attn_variants.places.layer import ConcatenatedPlaces

        return ConcatenatedPlaces(
            self.spec(config),
            width=config.width,
            bias=config.bias,
            borrows=config.borrows,
            projected=self.projected(config),
            dropout=config.dropout,
        )


def refuse_rotary(name: str, config: MechanismConfig) -> None:
    """Raise `Incompatible` where the model turns positions too."""
    if config.rotary is not None:
        raise Incompatible(f"mechanism {name!r} has positions of its own and takes no rotary ones", mechanism=name)
