"""Grouped-query attention."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attn_core import AttentionSpec, DeclaredMechanism, Heads, MechanismConfig, Paper

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask
from attn_variants.mechanisms.options import whole_numbers


class GroupedQueryAttention(DeclaredMechanism):
    """Scaled dot-product attention whose query heads share keys and values in equal groups.

    Where the config names no `key_value_heads`, the smallest sharing: groups of the least prime factor of `heads`.
    """

    name = "gqa"
    summary = "query heads share keys and values in groups"
    paper = Paper(
        title="GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
        authors="Ainslie et al.",
        year=2023,
        arxiv="2305.13245",
    )
    equation = (
        r"\mathrm{head}_h = \mathrm{softmax}\left(\frac{Q_h K_{g(h)}^\top}{\sqrt{d_k}} + M\right) V_{g(h)},\quad"
        r" g(h) = \lfloor h G / H \rfloor"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`groups` names the key/value head of each query head, where groups are not equal or not of neighbours."""

        groups: tuple[int, ...] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.groups is not None:
                object.__setattr__(self, "groups", whole_numbers("groups", self.groups))

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        return AttentionSpec(heads=grouped_heads(config), mask=self_mask(config), rotary=config.rotary)


def grouped_heads(config: MechanismConfig) -> Heads:
    """The config's heads, in the smallest groups above one where it names no key/value heads."""
    groups = GroupedQueryAttention.Config.of(config).groups
    if groups is not None:
        size = config.head_size or config.width // config.heads
        shared = config.key_value_heads or max(groups) + 1
        return Heads(query=config.heads, key_value=shared, key_size=size, value_size=size, groups=groups)
    if config.key_value_heads is not None or config.heads == 1:
        return config.head_layout
    share = next(share for share in range(2, config.heads + 1) if config.heads % share == 0)
    return dataclasses.replace(config.head_layout, key_value=config.heads // share)
