"""Attention of the softmax family as data: e = f(q, K), α = g(e), c = Σ α v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_core.distributions import Distribution, Softmax
from attn_core.errors import InvalidValue
from attn_core.heads import Heads, Part
from attn_core.masks.bands import Full
from attn_core.masks.base import Mask
from attn_core.modifiers import Modifier
from attn_core.norms import QkNorm
from attn_core.rotary import Rotary
from attn_core.scores import ScaledDot, Score

PRODUCTS = frozenset({"scaled_dot", "dot", "cosine"})
"""The scores that are a product of query and key, in which rotary positions are relative."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention function: its score, modifiers, mask, distribution and heads.

    `norm` and `rotary` are applied to queries and keys before the score, in this order. `cross` says that keys and
    values come from a source, not from the sequence of the queries; query positions are then counted from 0.
    """

    heads: Heads
    score: Score = ScaledDot()
    modifiers: tuple[Modifier, ...] = ()
    mask: Mask = Full()
    distribution: Distribution = Softmax()
    norm: QkNorm | None = None
    rotary: Rotary | None = None
    cross: bool = False

    def __post_init__(self) -> None:
        kinds = [modifier.kind for modifier in self.modifiers if modifier.weights(self.heads)]
        if len(set(kinds)) < len(kinds):
            allowed = "at most one modifier of each kind that has learned weights"
            raise InvalidValue.of("modifiers", [modifier.kind for modifier in self.modifiers], allowed)
        if self.mask.heads not in {None, self.heads.query}:
            allowed = f"{self.heads.query}, one mask per query head"
            raise InvalidValue.of("mask.heads", self.mask.heads, allowed)

    @property
    def equation(self) -> str:
        """The equation in LaTeX."""
        score = self.score.equation
        return rf"e = {score},\quad \alpha = {self.distribution.equation},\quad c = \alpha V"

    @property
    def parts(self) -> Mapping[str, Part]:
        """The parts that a kernel computes, by name: `score`, `modifiers.KIND`, `distribution`."""
        modifiers = {f"modifiers.{modifier.kind}": modifier for modifier in self.modifiers}
        return {"score": self.score, **modifiers, "distribution": self.distribution}

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the learned weights of all parts, by their names in `AttentionInputs.parameters`, such as
        `distribution.logit`.
        """
        return {
            f"{place}.{name}": shape
            for place, part in self.parts.items()
            for name, shape in part.weights(self.heads).items()
        }

    @property
    def located(self) -> bool:
        """Whether the result depends on the positions of queries and keys."""
        parts = self.mask.kind != "full" or self.score.kind == "location" or self.distribution.located
        return parts or any(modifier.located for modifier in self.modifiers)

    @property
    def relative(self) -> bool:
        """Whether only distances between positions matter, so that padding before a sequence changes no output.

        Rotary positions are relative in products of queries and keys, and absolute in every other use of them.
        """
        turned = self.score.kind in PRODUCTS and not any(modifier.scores_keys for modifier in self.modifiers)
        parts = self.mask.relative and all(modifier.relative for modifier in self.modifiers)
        return parts and self.score.kind != "location" and (self.rotary is None or turned)

    def query_flops(self) -> int:
        """FLOPs of matrix products per query token in all heads, whatever the keys; two per multiply-add."""
        return sum(part.query_flops(self.heads) for part in self.parts.values())

    def key_flops(self) -> int:
        """FLOPs of matrix products per key token in all heads, whatever the queries."""
        return sum(part.key_flops(self.heads) for part in self.parts.values())

    def pair_flops(self) -> int:
        """FLOPs of matrix products per query-key pair in all heads, including the weighted sum of the values."""
        values = 2 * self.heads.query * self.heads.value_size
        return values + sum(part.pair_flops(self.heads) for part in self.parts.values())

    def parameters(self) -> int:
        """Number of learned weights, excluding the projections."""
        own = sum(part.num_parameters(self.heads) for part in self.parts.values())
        return own + (self.norm.num_parameters(self.heads) if self.norm else 0)
