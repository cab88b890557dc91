"""Skipping of steps whose gradient norm is far larger than those of the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

import torch
from torch import Tensor

WINDOW = 100
"""The number of last steps whose gradient norms the median is taken of."""

FEWEST = 10
"""The number of steps that the median needs; before that, only norms that are not finite are too large."""


class GradientNorms:
    """The gradient norms of the last `WINDOW` steps, and the number of steps skipped because of too large a norm.

    A norm is too large if it is more than `ratio` times the median of the norms before it, or not finite. Every finite
    norm counts for the median, also those of skipped steps: if gradients stay larger, updates resume after half the
    window.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.skipped = 0
        self._norms: deque[float] = deque(maxlen=WINDOW)

    def limit(self) -> float:
        """Return the largest norm that the next step may have."""
        return self.ratio * median(self._norms) if len(self._norms) >= FEWEST else math.inf

    def too_large(self, norm: float) -> bool:
        """Whether the next step, whose gradient has this norm, is to be skipped."""
        return not (math.isfinite(norm) and norm <= self.limit())

    def add(self, norm: float, *, skipped: bool) -> None:
        """Record the norm of a step that was done or skipped."""
        if math.isfinite(norm):
            self._norms.append(norm)
        self.skipped += skipped

    def state(self) -> Mapping[str, Tensor]:
        """Return the state for a checkpoint, by name: the norms, float64 [norms], oldest first, and the int64 count."""
        norms = torch.tensor(list(self._norms), dtype=torch.float64)
        return {"norms": norms, "skipped": torch.tensor(self.skipped)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; does nothing for an empty state."""
        if state:
            self._norms = deque(state["norms"].tolist(), maxlen=WINDOW)
            self.skipped = int(state["skipped"])
