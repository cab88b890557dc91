"""The softmax family as data: e = f(q, K), α = g(e), c = Σ α v."""

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


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention of the family: score, modifiers, mask, distribution and heads.

    `norm` and `rotary` change queries and keys before they meet, in this order. `cross` says that keys and values come
    from a source, not from the sequence of the queries; queries then stand at positions counted from 0.
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
            allowed = "each kind that has learned weights once"
            raise InvalidValue.of("modifiers", [modifier.kind for modifier in self.modifiers], allowed)
        if self.mask.heads not in {None, self.heads.query}:
            allowed = f"{self.heads.query}, as many masks as there are query heads"
            raise InvalidValue.of("mask.heads", self.mask.heads, allowed)

    @property
    def equation(self) -> str:
        """The equation in LaTeX."""
        score = self.score.equation
        return rf"e = {score},\quad \alpha = {self.distribution.equation},\quad c = \alpha V"

    @property
    def parts(self) -> Mapping[str, Part]:
        """What a kernel computes, by place: `score`, `modifiers.KIND`, `distribution`."""
        modifiers = {f"modifiers.{modifier.kind}": modifier for modifier in self.modifiers}
        return {"score": self.score, **modifiers, "distribution": self.distribution}

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of a kernel's learned weights as `AttentionInputs.parameters` names them, such as
        `distribution.logit`.
        """
        return {
            f"{place}.{name}": shape
            for place, part in self.parts.items()
            for name, shape in part.weights(self.heads).items()
        }

    @property
    def located(self) -> bool:
        """Whether it matters where queries and keys stand."""
        parts = self.mask.kind != "full" or self.score.kind == "location" or self.distribution.located
        return parts or any(modifier.located for modifier in self.modifiers)

    def query_flops(self) -> int:
        """Matrix products per query token in all heads, before any key is met; two per multiply-add."""
        return sum(part.query_flops(self.heads) for part in self.parts.values())

    def key_flops(self) -> int:
        """Matrix products per key token in all heads, before any query is met."""
        return sum(part.key_flops(self.heads) for part in self.parts.values())

    def pair_flops(self) -> int:
        """Matrix products per pair of a query and a key in all heads, with the sum over the values."""
        values = 2 * self.heads.query * self.heads.value_size
        return values + sum(part.pair_flops(self.heads) for part in self.parts.values())

    def parameters(self) -> int:
        """Number of learned weights, without those of projections."""
        own = sum(part.num_parameters(self.heads) for part in self.parts.values())
        return own + (self.norm.num_parameters(self.heads) if self.norm else 0)
