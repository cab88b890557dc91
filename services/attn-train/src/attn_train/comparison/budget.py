"""The budget of every run of a comparison, in FLOPs, minutes or tokens, and the number of steps that it allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from attn_core.errors import InvalidValue

Unit = Literal["flops", "minutes", "tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A budget of `amount` FLOPs, minutes of training or tokens; `amount` is above 0."""

    unit: Unit
    amount: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse a text such as "flops=1e12"; raises `InvalidValue` for other texts."""
        unit, _, number = text.partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = math.nan
        for known in UNITS:
            if unit == known and math.isfinite(amount) and amount > 0:
                return cls(unit=known, amount=amount)
        allowed = " or ".join(f"{known}=NUMBER" for known in UNITS)
        raise InvalidValue.of("--budget", text, f"{allowed}, with a number above 0, such as flops=1e12")

    def steps(self, *, flops: float, tokens: float, seconds: float) -> int:
        """Return the number of whole steps that the budget allows, given the FLOPs, tokens and seconds of one step."""
        price = {"flops": flops, "tokens": tokens, "minutes": seconds / 60}[self.unit]
        return int(self.amount / price)

    def __str__(self) -> str:
        return f"{self.unit}={self.amount:g}"
