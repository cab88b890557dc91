"""KERPLE: attention with a learned logarithmic penalty on distance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    DeclaredMechanism,
    Full,
    Mechanism,
    MechanismConfig,
    Paper,
    hookimpl,
)
from attn_core.checks import require_number
from attn_core.modifiers import ScoreFunction


def logarithmic_bias(score: Any, head: Any, query: Any, key: Any, *, log_r1: Any, log_r2: Any) -> Any:
    """Subtract r1 log(1 + r2 |i - j|) from scores [batch, heads, query, key]; r1 and r2 are learned per head.

    `head`, `query` and `key` are integer tensors that broadcast with the scores: the index of the head and both
    positions. `log_r1` and `log_r2` [heads] are logarithms, so that r1 and r2 are positive, as the paper requires.
    """
    distance = (query - key).abs().to(score.dtype)
    return score - log_r1.exp()[head] * (1 + log_r2.exp()[head] * distance).log()


class Kerple(DeclaredMechanism):
    """Scaled dot-product attention with KERPLE's logarithmic bias."""

    name = "kerple_log"
    summary = "a learned penalty on the logarithm of the distance"
    paper = Paper(
        title="KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation",
        authors="Chi et al.",
        year=2022,
        arxiv="2205.09921",
    )
    equation = r"O = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} - r_1 \log(1 + r_2 |i - j|) + M\right) V"
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.CHOOSES}

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """The initial values of `r1`, the strength of the bias, and `r2`, the scale of distances; both are above
        zero."""

        r1: float = 1.0
        r2: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("r1", "r2"):
                require_number(name, getattr(self, name), gt=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention as data, from which the module, learned weights, state, cost and serving are derived."""
        own = self.Config.of(config)
        bias = ScoreFunction(
            logarithmic_bias,
            parameters={"log_r1": ("heads",), "log_r2": ("heads",)},
            initial={"log_r1": math.log(own.r1), "log_r2": math.log(own.r2)},
        )
        return AttentionSpec(
            heads=config.head_layout,
            modifiers=(bias,),
            mask=Causal() if config.causal else Full(),
            rotary=config.rotary,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [Kerple()]
