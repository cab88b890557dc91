"""Attention with rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import AttentionSpec, DeclaredMechanism, MechanismConfig, Paper, Rotary
from attn_core.errors import InvalidValue
from attn_core.rotary import rotary_scaling

from attn_variants.mechanisms.capabilities import GROUPED_SELF
from attn_variants.mechanisms.masks import self_mask


class RotaryAttention(DeclaredMechanism):
    """Scaled dot-product attention on queries and keys that are turned by their positions.

    The model's rotary positions are used where it has some, else those of the options.
    """

    name = "rope"
    summary = "queries and keys are turned by their positions"
    paper = Paper(
        title="RoFormer: Enhanced Transformer with Rotary Position Embedding",
        authors="Su et al.",
        year=2021,
        arxiv="2104.09864",
    )
    equation = (
        r"e_{ij} = \frac{(R_i q_i)^\top (R_j k_j)}{\sqrt{d_k}},\quad"
        r" R_m = \mathrm{diag}\left(e^{\mathrm{i} m \theta_0}, e^{\mathrm{i} m \theta_1}, \dots\right),\quad"
        r" \theta_p = b^{-2p/d_k}"
    )
    capabilities = GROUPED_SELF

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`base` b of the angles; `fraction` of each head is turned; `interleaved` pairs neighbours, as the paper.

        `scaling` stretches the positions: {"kind": "yarn", "factor": 4, "context": 4096} and so on, of kind linear,
        dynamic, yarn, llama3 or longrope with the fields of `attn_core`'s class of that kind.
        """

        base: float = 10000.0
        fraction: float = 1.0
        interleaved: bool = False
        scaling: Mapping[str, Any] | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.base > 1:
                raise InvalidValue.of("base", self.base, "a number above 1")
            if not 0 < self.fraction <= 1:
                raise InvalidValue.of("fraction", self.fraction, "above 0 and at most 1")
            _ = self.own

        @property
        def own(self) -> Rotary:
            """The rotary positions of the options."""
            scaling = None if self.scaling is None else rotary_scaling(self.scaling)
            return Rotary(base=self.base, fraction=self.fraction, interleaved=self.interleaved, scaling=scaling)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """Raises `InvalidValue` where the key/value heads do not divide the heads."""
        options = self.Config.of(config)
        return AttentionSpec(heads=config.head_layout, mask=self_mask(config), rotary=config.rotary or options.own)
