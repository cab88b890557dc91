"""Changes to the scores that have no learned weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core.errors import InvalidValue
from attn_core.part import Part


@dataclass(frozen=True, kw_only=True)
class Modifier(Part):
    """A change to the scores before the distribution, or to the values that are summed.

    `located` says that the change depends on where queries and keys stand.
    """

    located: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Alibi(Modifier):
    """Adds -m_h |i - j|, slopes m_h = 2^(-8h/H) (Press et al. 2022, arXiv 2108.12409)."""

    kind = "alibi"

    def slopes(self, heads: int) -> list[float]:
        """m_h for h = 1..H; where H is no power of two, those of the one below, then every other one of the next."""
        power = 1 << (heads.bit_length() - 1)
        slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
        between = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
        return slopes + between[: heads - power]


@dataclass(frozen=True, kw_only=True)
class SoftCap(Modifier):
    """c tanh(e / c) before the mask (Gemma 2, arXiv 2408.00118)."""

    cap: float
    kind = "soft_cap"
    located = False

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise InvalidValue.of("soft_cap.cap", self.cap, "a number above 0")


@dataclass(frozen=True)
class ScoreFunction(Modifier):
    """A change given as a function, FlexAttention's `score_mod` without the batch.

    `function(score, head, query, key)` gets scores [batch, heads, query, key] and integer tensors that
    broadcast with them (head index, absolute query and key positions), and returns the new scores.
    """

    function: Callable[[Any, Any, Any, Any], Any]
    kind = "function"
