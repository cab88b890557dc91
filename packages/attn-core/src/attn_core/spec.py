"""The softmax family as data: e = f(q, K), α = g(e), c = Σ α v."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.distribution import Distribution, Softmax
from attn_core.heads import Heads
from attn_core.mask import Full, Mask
from attn_core.score import Modifier, Rotary, ScaledDot, Score


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention of the family: score, modifiers, mask, distribution and heads.

    `cross` says that keys and values come from a source, not from the sequence of the queries.
    """

    heads: Heads
    score: Score = ScaledDot()
    modifiers: tuple[Modifier, ...] = ()
    mask: Mask = Full()
    distribution: Distribution = Softmax()
    rotary: Rotary | None = None
    cross: bool = False

    @property
    def equation(self) -> str:
        """The equation in LaTeX."""
        score = self.score.equation
        return rf"e = {score},\quad \alpha = {self.distribution.equation},\quad c = \alpha V"
