"""The early-stopping schedule of a comparison: its rungs, and how many runs are promoted from each."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from attn_core.errors import InvalidValue

POINTS = 10
"""The number of evaluations during a run."""
ASHA = "asha"
LEAST_PARTS = 10
"""Minimum steps between evaluations: rounding to whole steps then changes a rung's budget by at most 1 in 10."""


@dataclass(frozen=True, kw_only=True)
class Asha:
    """Asynchronous successive halving (Li et al. 2020, arXiv 1810.05934): most runs are stopped early.

    Of the contenders that reach a rung, the best 1 in `reduction_factor` is promoted to the next rung, whose budget is
    `reduction_factor` times larger. There are `promotions` + 1 rungs; the last one is the whole budget.
    """

    reduction_factor: int
    promotions: int

    @classmethod
    def of(cls, name: str, reduction_factor: int, contenders: int) -> Asha | None:
        """Return the schedule of this name with as many rungs as leave about one contender at the last; None for "".

        Raises `InvalidValue` for an unknown name, a factor below 2, or fewer than two contenders.
        """
        if not name:
            return None
        if name != ASHA:
            raise InvalidValue.of("--schedule", name, ASHA)
        if reduction_factor < 2:
            raise InvalidValue.of("--reduction-factor", reduction_factor, "a whole number from 2")
        if contenders < 2:
            raise InvalidValue.of(
                "--schedule", name, f"a schedule only for two or more candidates; there is {contenders}"
            )
        promotions = 1
        while reduction_factor ** (promotions + 1) <= contenders:
            promotions += 1
        return cls(reduction_factor=reduction_factor, promotions=promotions)

    @property
    def rungs(self) -> list[Fraction]:
        """The share of the budget at each rung; the last is 1."""
        return [Fraction(1, self.reduction_factor**left) for left in range(self.promotions, -1, -1)]

    @property
    def parts(self) -> int:
        """The number of equal parts into which the steps are divided, so that each rung is at the end of a part."""
        smallest: int = self.reduction_factor**self.promotions
        return smallest * max(1, POINTS // smallest)

    @property
    def least_steps(self) -> int:
        """The minimum number of steps of a run, for budgets that are about equal at each rung."""
        return LEAST_PARTS * self.parts

    def whole_steps(self, steps: int) -> int:
        """Round a number of steps down to whole parts."""
        return steps - steps % self.parts

    def steps(self, steps: int) -> list[int]:
        """Return the step of each rung of a run with `steps` steps, a multiple of `parts`."""
        return [int(share * steps) for share in self.rungs]

    def promoted(self, arrived: int, *, complete: bool) -> int:
        """Return how many of `arrived` contenders at a rung are promoted.

        At least one is, if the rung is `complete`: no other contender can reach it.
        """
        return max(arrived // self.reduction_factor, int(complete and arrived > 0))

    def __str__(self) -> str:
        shares = ", ".join(str(share) for share in self.rungs)
        return f"{ASHA}, reduction factor {self.reduction_factor}, rungs at {shares} of the budget"
