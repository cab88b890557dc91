"""Confidence intervals of means over seeds and of scaling exponents fitted to losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""The confidence level of all intervals."""
T_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""The 0.975 quantile of Student's t distribution with 1, 2, ... degrees of freedom."""


def t_quantile(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t with `freedom` degrees of freedom; above 30, that of 30."""
    return T_QUANTILES[min(freedom, len(T_QUANTILES)) - 1]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and the half-width of its 95 % interval, which is NaN if there are too few values."""

    value: float
    half_width: float

    @classmethod
    def of_mean(cls, values: Sequence[float]) -> Interval:
        """Return the mean of at least one value, with Student's interval."""
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(value=mean, half_width=math.nan)
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(value=mean, half_width=t_quantile(len(values) - 1) * error)

    def plain(self) -> dict[str, float | None]:
        """Return `value` and `half_width` as JSON values; an unknown `half_width` is None."""
        return {"value": self.value, "half_width": None if math.isnan(self.half_width) else self.half_width}

    def text(self, digits: int = 4) -> str:
        """Return text such as `1.2345 ± 0.0123`, or the value alone if the width is unknown."""
        if math.isnan(self.half_width):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ± {self.half_width:.{digits}f}"


def fitted_exponent(sizes: Sequence[float], losses: Sequence[float]) -> Interval:
    """Fit b of loss = a · size^-b by least squares on the logarithms (as in Kaplan et al. 2020, arXiv 2001.08361).

    The interval is Student's with two degrees of freedom less than points. At least two sizes must differ.
    """
    x, y = [math.log(size) for size in sizes], [math.log(loss) for loss in losses]
    fit = statistics.linear_regression(x, y)
    freedom = len(x) - 2
    if freedom < 1:
        return Interval(value=-fit.slope, half_width=math.nan)
    left = sum((b - fit.intercept - fit.slope * a) ** 2 for a, b in zip(x, y, strict=True))
    middle = statistics.fmean(x)
    error = math.sqrt(left / freedom / sum((a - middle) ** 2 for a in x))
    return Interval(value=-fit.slope, half_width=t_quantile(freedom) * error)
