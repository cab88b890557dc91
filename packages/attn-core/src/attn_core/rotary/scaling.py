"""How rotary positions are stretched beyond the lengths that a model was trained on.

An angle depends on nothing but the position, so that a remembered key stays right while its sequence grows. Where a
paper lets it depend on the length, the longest `length` that is to be met decides once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from attn_core.errors import InvalidValue


@dataclass(frozen=True, kw_only=True)
class RotaryScaling(ABC):
    """A rule for the angles."""

    kind: ClassVar[str]

    @abstractmethod
    def frequencies(self, base: float, rotated: int) -> list[float]:
        """Angle per position of each of the `rotated` / 2 pairs, in radians."""

    @property
    def attention_factor(self) -> float:
        """What turned queries and keys are multiplied by; scores by its square."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RotaryScaling):
    """Positions divided by `factor` (position interpolation, Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    kind = "linear"

    def __post_init__(self) -> None:
        check_factor(self.kind, self.factor)

    def frequencies(self, base: float, rotated: int) -> list[float]:
        return [frequency / self.factor for frequency in unscaled(base, rotated)]


@dataclass(frozen=True, kw_only=True)
class DynamicNtk(RotaryScaling):
    """The base grows with the length, so that high frequencies stay (bloc97 2023; arXiv 2309.00071, section 3.2).

    `context` is the longest sequence of the training, `length` the longest that is to be met; up to `context` nothing
    changes.
    """

    factor: float
    context: int
    length: int
    kind = "dynamic"

    def __post_init__(self) -> None:
        check_factor(self.kind, self.factor)
        check_context(self.kind, self.context)
        check_context(self.kind, self.length, field="length")

    def frequencies(self, base: float, rotated: int) -> list[float]:
        if rotated <= 2:
            return unscaled(base, rotated)
        stretched = self.factor * max(self.length, self.context) / self.context - (self.factor - 1)
        return unscaled(base * stretched ** (rotated / (rotated - 2)), rotated)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RotaryScaling):
    """Long waves are divided by `factor`, short ones kept, those between blended (Llama 3.1, arXiv 2407.21783).

    Long are waves above `context` / `low`, short those below `context` / `high`.
    """

    factor: float
    context: int
    low: float = 1.0
    high: float = 4.0
    kind = "llama3"

    def __post_init__(self) -> None:
        check_factor(self.kind, self.factor)
        check_context(self.kind, self.context)
        if not 0 < self.low < self.high:
            raise InvalidValue.of("llama3.low", self.low, f"above 0 and below high, {self.high}")

    def frequencies(self, base: float, rotated: int) -> list[float]:
        return [self._of(frequency) for frequency in unscaled(base, rotated)]

    def _of(self, frequency: float) -> float:
        turns = self.context * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - self.low) / (self.high - self.low)))
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True, kw_only=True)
class LongRope(RotaryScaling):
    """Every pair is divided by a factor of its own, found by search (LongRoPE, Ding et al. 2024, arXiv 2402.13753).

    `long` factors are used where the longest sequence to be met, `length`, exceeds the `context` of the training, else
    `short` ones; one factor per pair. `attention` replaces √(1 + ln(length / context) / ln(context)).
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    context: int
    length: int
    attention: float | None = None
    kind = "longrope"

    def __post_init__(self) -> None:
        check_context(self.kind, self.context)
        check_context(self.kind, self.length, field="length")
        for field in ("short", "long"):
            factors = tuple(getattr(self, field))
            object.__setattr__(self, field, factors)
            if not factors or not all(isinstance(factor, (int, float)) and factor > 0 for factor in factors):
                raise InvalidValue.of(f"longrope.{field}", factors, "a positive number for each rotated pair")

    def frequencies(self, base: float, rotated: int) -> list[float]:
        word = "long" if self.length > self.context else "short"
        factors = self.long if word == "long" else self.short
        if len(factors) != rotated // 2:
            allowed = f"{rotated // 2}, one for each rotated pair"
            raise InvalidValue.of(f"longrope.{word}", f"{len(factors)} factors", allowed)
        pairs = zip(unscaled(base, rotated), factors, strict=True)
        return [frequency / factor for frequency, factor in pairs]

    @property
    def attention_factor(self) -> float:
        if self.attention is not None:
            return self.attention
        if self.length <= self.context:
            return 1.0
        return math.sqrt(1 + math.log(self.length / self.context) / math.log(self.context))


def unscaled(base: float, rotated: int) -> list[float]:
    """base^(-2p/d) of each pair p of d = `rotated` elements."""
    return [base ** (-2 * pair / rotated) for pair in range(rotated // 2)]


def check_factor(kind: str, factor: object) -> None:
    """Raise `InvalidValue` unless positions can be stretched by this."""
    if not isinstance(factor, (int, float)) or not 1 <= factor < math.inf:
        raise InvalidValue.of(f"{kind}.factor", factor, "a number from 1")


def check_context(kind: str, context: object, field: str = "context") -> None:
    """Raise `InvalidValue` unless this is a number of tokens."""
    if not isinstance(context, int) or context < 2:
        raise InvalidValue.of(f"{kind}.{field}", context, "a whole number of tokens from 2")
