"""The rungs of a comparison whose runs stop early, and how many go on from each."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from attn_core.errors import InvalidValue

POINTS = 10
"""Measurements along the course of a run."""
ASHA = "asha"
LEAST_PARTS = 10
"""Least steps between measurements: at each rung whole steps make budgets differ by one in so many at most."""


@dataclass(frozen=True, kw_only=True)
class Asha:
    """Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934): most runs stop early.

    Of those who reach a rung, the best one in `reduction_factor` goes on, to a budget that is so many times larger;
    this happens `promotions` times, so that there is one rung more. The last is the whole budget.
    """

    reduction_factor: int
    promotions: int

    @classmethod
    def of(cls, name: str, reduction_factor: int, contenders: int) -> Asha | None:
        """The schedule of a name for so many contenders, of whom one is to reach the last rung; None for "".

        Raises `InvalidValue` for another name, a factor below 2 and fewer than two contenders.
        """
        if not name:
            return None
        if name != ASHA:
            raise InvalidValue.of("--schedule", name, ASHA)
        if reduction_factor < 2:
            raise InvalidValue.of("--reduction-factor", reduction_factor, "a whole number from 2")
        if contenders < 2:
            raise InvalidValue.of("--schedule", name, f"two or more to choose from, and there is {contenders}")
        promotions = 1
        while reduction_factor ** (promotions + 1) <= contenders:
            promotions += 1
        return cls(reduction_factor=reduction_factor, promotions=promotions)

    @property
    def rungs(self) -> list[Fraction]:
        """The share of the budget that is spent at each rung; the last is 1."""
        return [Fraction(1, self.reduction_factor**left) for left in range(self.promotions, -1, -1)]

    @property
    def parts(self) -> int:
        """Into how many equal parts steps are divided, so that each rung is at the end of one."""
        smallest: int = self.reduction_factor**self.promotions
        return smallest * max(1, POINTS // smallest)

    @property
    def least_steps(self) -> int:
        """Fewer steps are not enough for budgets that are equal at each rung."""
        return LEAST_PARTS * self.parts

    def whole_steps(self, steps: int) -> int:
        """The steps, less those that do not fill a part."""
        return steps - steps % self.parts

    def steps(self, steps: int) -> list[int]:
        """The step of each rung of a run of so many steps, which fill whole parts."""
        return [int(share * steps) for share in self.rungs]

    def promoted(self, arrived: int, *, complete: bool) -> int:
        """How many of so many who have reached a rung go on: at least one once nobody else can reach it."""
        return max(arrived // self.reduction_factor, int(complete and arrived > 0))

    def __str__(self) -> str:
        shares = ", ".join(str(share) for share in self.rungs)
        return f"{ASHA}, reduction factor {self.reduction_factor}, rungs at {shares} of the budget"
