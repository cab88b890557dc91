"""Beam search as a request asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.errors import InvalidValue

MOST_BEAMS = 64
MOST_PENALTY = 10
STOPPING = ("hopeless", "full", "never")


@dataclass(frozen=True, kw_only=True)
class Beams:
    """The `width` likeliest beginnings go on at every step; raises `InvalidValue` that names the field.

    A completion of n tokens scores its log-probability divided by n to the power of `length_penalty`: above 0 longer
    ones gain, below 0 they lose. The search ends where no beginning can go on and, by `stopping`,

    - "full": as soon as `width` completions have ended;
    - "hopeless": once `width` have ended and the best beginning, scored at its present length, is no better than the
      worst of them;
    - "never": as "hopeless", but with a positive penalty the best beginning is scored at the greatest length.
    """

    width: int
    length_penalty: float = 1.0
    stopping: str = "hopeless"

    def __post_init__(self) -> None:
        # A caller without a type checker may give anything.
        width: Any = self.width
        penalty: Any = self.length_penalty
        if isinstance(width, bool) or not isinstance(width, int) or not 2 <= width <= MOST_BEAMS:
            raise InvalidValue.of("beams.width", width, f"a whole number from 2 to {MOST_BEAMS}")
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= MOST_PENALTY:
            raise InvalidValue.of("beams.length_penalty", penalty, f"a number from -{MOST_PENALTY} to {MOST_PENALTY}")
        if self.stopping not in STOPPING:
            raise InvalidValue.of("beams.stopping", self.stopping, ", ".join(STOPPING))
