"""Steps whose gradient is far larger than those before it, which are left out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

WINDOW = 100
"""Steps whose gradient norms the median is of."""

FEWEST = 10
"""Steps that the median needs; before them only a norm that is not finite is too large."""


class GradientNorms:
    """The gradient norms of the last `WINDOW` steps, and how many steps were skipped as theirs was too large.

    A norm is too large if it is more than `ratio` times the median of those before it, or not finite. Every finite one
    counts for the median, also of a skipped step: where gradients stay larger, updates go on after half the window.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.skipped = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def limit(self) -> float:
        """The largest norm that the next step may have."""
        return self.ratio * median(self._norms) if len(self._norms) >= FEWEST else math.inf

    def too_large(self, norm: float) -> bool:
        """Whether the next step, whose gradient has this norm, is to be skipped."""
        return not (math.isfinite(norm) and norm <= self.limit())

    def add(self, norm: float, *, skipped: bool) -> None:
        """A step was done, or skipped."""
        if math.isfinite(norm):
            self._norms.append(norm)
        self.skipped += skipped

    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint keeps, by name: float64 [norms], oldest first, and an int64 scalar."""
        norms = torch.tensor(list(self._norms), dtype=torch.float64)
        return {"norms": norms, "skipped": torch.tensor(self.skipped)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave; nothing where a checkpoint has none."""
        if state:
            self._norms = deque(state["norms"].tolist(), maxlen=WINDOW)
            self.skipped = int(state["skipped"])
