"""KERPLE: attention that fades with the logarithm of the distance."""

from __future__ import annotations

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


@dataclass(frozen=True)
class LogarithmicBias:
    """Adds -r1 log(1 + r2 |i - j|) to scores [batch, heads, query, key]."""

    r1: float
    r2: float

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG002 -- the same in every head
        """The new scores; `query` and `key` are integer tensors of positions that broadcast with them."""
        distance = (query - key).abs().to(score.dtype)
        return score - self.r1 * (1 + self.r2 * distance).log()


class Kerple(DeclaredMechanism):
    """Scaled dot-product attention with KERPLE's logarithmic bias; r1 and r2 are given, not learned."""

    name = "kerple_log"
    summary = "scores fall with the logarithm of the distance"
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
        """`r1` is the strength of the bias, `r2` how soon it sets in; both are above zero."""

        r1: float = 1.0
        r2: float = 1.0

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("r1", "r2"):
                require_number(name, getattr(self, name), gt=0)

    def spec(self, config: MechanismConfig) -> AttentionSpec:
        """The attention as data: module, state, price and serving follow from it."""
        own = self.Config.of(config)
        return AttentionSpec(
            heads=config.head_layout,
            modifiers=(ScoreFunction(LogarithmicBias(own.r1, own.r2)),),
            mask=Causal() if config.causal else Full(),
            rotary=config.rotary,
        )


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """What this plugin offers."""
    return [Kerple()]
