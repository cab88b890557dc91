"""A budget that every run of a comparison may spend: FLOPs, minutes or tokens; and the steps that it buys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from attn_core.errors import InvalidValue

Unit = Literal["flops", "minutes", "tokens"]
UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """`amount` of FLOPs, minutes of training or tokens, above 0."""

    unit: Unit
    amount: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """The budget of "flops=1e12"; raises `InvalidValue`."""
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
        """The whole steps it buys at the price of one: in FLOPs, tokens and seconds; 0 if not even one."""
        price = {"flops": flops, "tokens": tokens, "minutes": seconds / 60}[self.unit]
        return int(self.amount / price)

    def __str__(self) -> str:
        return f"{self.unit}={self.amount:g}"
