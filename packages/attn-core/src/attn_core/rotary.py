"""Rotary positions and their scaling to longer sequences, as data, and fixed sinusoidal positions."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.checks import require_flag, require_number, require_whole
from attn_core.errors import InvalidValue, UnknownName

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, kw_only=True)
class RotaryScaling(ABC):
    """A rule that changes the rotary frequencies for longer sequences."""

    kind: ClassVar[str]

    @abstractmethod
    def frequencies(self, base: float, rotated: int) -> list[float]:
        """Angle per position of each of the `rotated` / 2 pairs, in radians."""

    @property
    def attention_factor(self) -> float:
        """The factor by which rotated queries and keys are multiplied, and so scores by its square."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RotaryScaling):
    """Positions divided by `factor` (position interpolation, Chen et al. 2023, arXiv 2306.15595)."""

    factor: float
    kind = "linear"

    def __post_init__(self) -> None:
        require_number(f"{self.kind}.factor", self.factor, ge=1)

    def frequencies(self, base: float, rotated: int) -> list[float]:
        return [frequency / self.factor for frequency in unscaled(base, rotated)]


@dataclass(frozen=True, kw_only=True)
class DynamicNtk(RotaryScaling):
    """The base grows with the length, so that high frequencies stay (bloc97 2023; arXiv 2309.00071, section 3.2).

    `original_max_position_embeddings` is the longest sequence in training, `length` the longest one in use; up to
    `original_max_position_embeddings` nothing changes.
    """

    factor: float
    original_max_position_embeddings: int
    length: int
    kind = "dynamic"

    def __post_init__(self) -> None:
        require_number(f"{self.kind}.factor", self.factor, ge=1)
        for field in WHOLE:
            require_context(self, field)

    def frequencies(self, base: float, rotated: int) -> list[float]:
        if rotated <= 2:
            return unscaled(base, rotated)
        base_factor = self.factor * max(
            self.length, self.original_max_position_embeddings
        ) / self.original_max_position_embeddings - (self.factor - 1)
        return unscaled(base * base_factor ** (rotated / (rotated - 2)), rotated)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RotaryScaling):
    """Frequencies of long waves are divided by `factor`, those of short waves kept, those between interpolated.

    Waves are long above `original_max_position_embeddings` / `low` and short below
    `original_max_position_embeddings` / `high` positions (Llama 3.1, arXiv 2407.21783).
    """

    factor: float
    original_max_position_embeddings: int
    low: float = 1.0
    high: float = 4.0
    kind = "llama3"

    def __post_init__(self) -> None:
        require_number(f"{self.kind}.factor", self.factor, ge=1)
        require_context(self, "original_max_position_embeddings")
        require_number("llama3.high", self.high, gt=0)
        require_number("llama3.low", self.low, gt=0, le=self.high)

    def frequencies(self, base: float, rotated: int) -> list[float]:
        return [self._of(frequency) for frequency in unscaled(base, rotated)]

    def _of(self, frequency: float) -> float:
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        # Llama 4 has nothing to interpolate.
        between = (turns - self.low) / (self.high - self.low) if self.high > self.low else float(turns >= self.low)
        kept = min(1.0, max(0.0, between))
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True, kw_only=True)
class LongRope(RotaryScaling):
    """The frequency of each pair is divided by its own factor, found by search (Ding et al. 2024, arXiv 2402.13753).

    LongRoPE. The `long` factors, one per pair, are used where the longest sequence in use, `length`, exceeds the
    longest in training, `original_max_position_embeddings`, else the `short` ones. `attention` replaces the factor
    √(1 + ln(length / context) / ln(context)), where context is `original_max_position_embeddings`.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    length: int
    attention: float | None = None
    kind = "longrope"

    def __post_init__(self) -> None:
        for field in WHOLE:
            require_context(self, field)
        for field in ("short", "long"):
            factors = getattr(self, field)
            if not isinstance(factors, (list, tuple)) or not factors:
                raise InvalidValue.of(f"longrope.{field}", factors, "a number above 0 for each rotated pair")
            for factor in factors:
                require_number(f"longrope.{field}", factor, gt=0)
            object.__setattr__(self, field, tuple(factors))
        require_number("longrope.attention", self.attention, gt=0, optional=True)

    def frequencies(self, base: float, rotated: int) -> list[float]:
        word = "long" if self.length > self.original_max_position_embeddings else "short"
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
        if self.length <= self.original_max_position_embeddings:
            return 1.0
        return math.sqrt(
            1
            + math.log(self.length / self.original_max_position_embeddings)
            / math.log(self.original_max_position_embeddings)
        )


@dataclass(frozen=True, kw_only=True)
class Proportional(RotaryScaling):
    """Of the pairs of a whole head only the first `fraction` turn; the others keep their place in pairs, unturned.

    Frequencies are those of a head that turns completely, divided by `factor` (Gemma 4). `Rotary.fraction`, in
    contrast, makes pairs of the first part of a head only.
    """

    fraction: float
    factor: float = 1.0
    kind = "proportional"

    def __post_init__(self) -> None:
        require_number("proportional.fraction", self.fraction, ge=0, le=1)
        require_number("proportional.factor", self.factor, ge=1)

    def frequencies(self, base: float, rotated: int) -> list[float]:
        turned = int(self.fraction * rotated // 2)
        found = [frequency / self.factor for frequency in unscaled(base, rotated)[:turned]]
        return found + [0.0] * (rotated // 2 - turned)


def unscaled(base: float, rotated: int) -> list[float]:
    """The frequency base^(-2p/d) of each pair p of d = `rotated` elements."""
    return [base ** (-2 * pair / rotated) for pair in range(rotated // 2)]


def require_context(scaling: RotaryScaling, field: str) -> None:
    """Raise `InvalidValue` unless the field is a whole number of tokens from 2."""
    require_whole(f"{scaling.kind}.{field}", getattr(scaling, field), ge=2, unit="tokens")


@dataclass(frozen=True, kw_only=True)
class Yarn(RotaryScaling):
    """Frequencies of pairs that turn more than `fast` times in the training's `original_max_position_embeddings` are
    kept, those that turn less than `slow` times divided by `factor`, and those between interpolated by their index
    (Peng et al. 2023, arXiv 2309.00071).

    `attention` replaces the paper's factor 0.1 ln(factor) + 1 on queries and keys alike. `whole_pairs` rounds the range
    of interpolated pairs outwards to whole pairs, as the paper's code does.
    """

    factor: float
    original_max_position_embeddings: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    whole_pairs: bool = True
    kind = "yarn"

    def __post_init__(self) -> None:
        require_number(f"{self.kind}.factor", self.factor, ge=1)
        require_context(self, "original_max_position_embeddings")
        require_number("yarn.fast", self.fast, gt=0)
        require_number("yarn.slow", self.slow, gt=0, lt=self.fast)
        require_number("yarn.attention", self.attention, gt=0, optional=True)
        require_flag("yarn.whole_pairs", self.whole_pairs)

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
        """The first and the last pair that are interpolated; fractions where `whole_pairs` is off."""
        low, high = (self._pair_turning(times, base, rotated) for times in (self.fast, self.slow))
        if self.whole_pairs:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        # Equal ends would divide by zero; at this distance the blend is in effect a step.
        return low, high if high > low else low + 0.001

    def _pair_turning(self, times: float, base: float, rotated: int) -> float:
        return rotated * math.log(self.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions on queries and keys (Su et al. 2021, arXiv 2104.09864).

    `fraction` of each head is rotated; `interleaved` pairs (0, 1), (2, 3), ... as in the paper, otherwise the
    first half with the second, as in Llama checkpoints. `scaling` stretches the positions to longer sequences.
    """

    base: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False
    scaling: RotaryScaling | None = None

    def frequencies(self, rotated: int) -> list[float]:
        """Angle per position of each of the `rotated` / 2 pairs, in radians."""
        if self.scaling is not None:
            return self.scaling.frequencies(self.base, rotated)
        return [self.base ** (-2 * pair / rotated) for pair in range(rotated // 2)]

    @property
    def attention_factor(self) -> float:
        """The factor by which rotated queries and keys are multiplied."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor


def layer_rotary(model: Rotary | None, words: object) -> Rotary:
    """The rotary positions of one layer: those of the `model`, with the fields of `Rotary` that `words` change.

    `words` is a mapping such as {"base": 1e6, "fraction": 0.5, "scaling": {"kind": "linear", "factor": 4}}. Raises
    `InvalidValue` for anything else, for a bad value, and for a model without rotary positions.
    """
    fields = [field.name for field in dataclasses.fields(Rotary)]
    if model is None or not isinstance(words, Mapping) or words.keys() - set(fields):
        allowed = f"null, or an object with any of {', '.join(fields)} in a model with rotary positions"
        raise InvalidValue.of("rotary", words, allowed)
    values = dict(words)
    require_number("rotary.base", values.get("base", model.base), gt=1)
    require_number("rotary.fraction", values.get("fraction", model.fraction), ge=0, le=1)
    require_flag("rotary.interleaved", values.get("interleaved", model.interleaved))
    if values.get("scaling") is not None:
        values["scaling"] = rotary_scaling(values["scaling"])
    return dataclasses.replace(model, **values)


KINDS: Mapping[str, type[RotaryScaling]] = {
    scaling.kind: scaling for scaling in (LinearScaling, DynamicNtk, Yarn, Llama3Scaling, LongRope, Proportional)
}
WHOLE = ("original_max_position_embeddings", "length")


def rotary_scaling(words: object) -> RotaryScaling:
    """Build a scaling from a mapping such as {"kind": "linear", "factor": 4}; the fields are those of the kind's class.

    Raises `UnknownName` for a kind or field that does not exist, `InvalidValue` for one that is missing or bad.
    """
    if not isinstance(words, Mapping) or not isinstance(words.get("kind"), str):
        raise InvalidValue.of("scaling", words, f"an object with a `kind` of {', '.join(KINDS)}")
    values = dict(words)
    kind = values.pop("kind")
    if kind not in KINDS:
        raise UnknownName.of("rotary scaling", kind, KINDS)
    fields = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    for name in values:
        if name not in fields:
            raise UnknownName.of(f"field of rotary scaling {kind!r}", name, fields)
    missing = [n for n, field in fields.items() if field.default is dataclasses.MISSING and n not in values]
    if missing:
        raise InvalidValue.of("scaling", dict(words), f"an object that also has {', '.join(missing)}")
    return KINDS[kind](**{name: _typed(name, value) for name, value in values.items()})


def _typed(name: str, value: Any) -> Any:
    """Convert whole floats to ints in fields of tokens (protobuf's Struct has only floats), and lists to tuples."""
    if name in WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    return tuple(value) if isinstance(value, list) else value


BASE = 10000.0


def sinusoidal(positions: Tensor, width: int) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/width)), PE(p, 2i+1) = cos of the same: float64 [..., width] for integers [...].

    For an odd width the last element is a sine without its cosine (Vaswani et al. 2017, section 3.5). Angles are
    computed in float64, so that far positions are accurate. Only methods of tensors are used. The result is on the
    device of `positions`, or on the CPU for MPS, which has no float64.
    """
    places = (positions.cpu() if positions.device.type == "mps" else positions).double()[..., None]
    frequencies = [BASE ** (-2 * pair / width) for pair in range((width + 1) // 2)]
    angles = places * places.new_tensor(frequencies, device=places.device)
    sinusoids = angles.new_empty(*positions.shape, width)
    sinusoids[..., 0::2] = angles.sin()
    sinusoids[..., 1::2] = angles[..., : width // 2].cos()
    return sinusoids
