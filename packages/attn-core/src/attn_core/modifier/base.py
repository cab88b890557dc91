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
