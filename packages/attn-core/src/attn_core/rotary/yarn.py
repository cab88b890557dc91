"""YaRN."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attn_core.errors import InvalidValue
from attn_core.rotary.scaling import RotaryScaling, check_context, check_factor, unscaled


@dataclass(frozen=True, kw_only=True)
class Yarn(RotaryScaling):
    """Pairs that turn more than `fast` times in the training's `context` are kept, those that turn less than `slow`
    times divided by `factor`, those between blended by their place (Peng et al. 2023, arXiv 2309.00071).

    `attention` replaces the paper's factor 0.1 ln(factor) + 1 on queries and keys alike. `whole_pairs` rounds the ends
    of the blend outwards to whole pairs, as the paper's code does.
    """

    factor: float
    context: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    whole_pairs: bool = True
    kind = "yarn"

    def __post_init__(self) -> None:
        check_factor(self.kind, self.factor)
        check_context(self.kind, self.context)
        if not 0 < self.slow < self.fast:
            raise InvalidValue.of("yarn.slow", self.slow, f"above 0 and below fast, {self.fast}")
        if self.attention is not None and not self.attention > 0:
            raise InvalidValue.of("yarn.attention", self.attention, "a number above 0")

    def frequencies(self, base: float, rotated: int) -> list[float]:
        low, high = self.blended(base, rotated)
        found = []
        for pair, frequency in enumerate(unscaled(base, rotated)):
            slowed = min(1.0, max(0.0, (pair - low) / (high - low)))
            found.append(slowed * frequency / self.factor + (1 - slowed) * frequency)
        return found

    @property
    def attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.attention is None else self.attention

    def blended(self, base: float, rotated: int) -> tuple[float, float]:
        """The first and the last pair of the blend; fractions where `whole_pairs` is off."""
        low, high = (self._pair_turning(times, base, rotated) for times in (self.fast, self.slow))
        if self.whole_pairs:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        # Equal ends would divide by zero; this far apart is as good as a step.
        return low, high if high > low else low + 0.001

    def _pair_turning(self, times: float, base: float, rotated: int) -> float:
        return rotated * math.log(self.context / (times * 2 * math.pi)) / (2 * math.log(base))
