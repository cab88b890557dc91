"""How the next token is chosen, as a request asks for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from attn_core.errors import InvalidValue

from attn_engine.beams import Beams
from attn_engine.grammar import Grammar
from attn_engine.limits import MOST_GUESSES

MOST_STOPS = 16
MOST_ALTERNATIVES = 20
MOST_BIASES = 1024
MOST_COMPLETIONS = 64
LARGEST_BIAS = 100.0
LARGEST_PENALTY = 2.0
SEED_LIMIT = 2**64


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of one generation; raises `InvalidValue` that names the field for what is out of range.

    Applied in this order: `repetition_penalty` divides positive and multiplies negative logits of tokens already seen
    (Keskar et al. 2019, arXiv 1909.05858); `frequency_penalty` is subtracted for each time a token was generated,
    `presence_penalty` once if it was; `logit_bias` is added by token id; `min_new_tokens` keeps the end tokens away at
    first; `grammar` allows only what the completion can still become, and ends it where it allows nothing more;
    `temperature` divides the logits, 0 takes the likeliest token; `top_k`
    keeps the k likeliest (0: all); `top_p` keeps the smallest set of likeliest tokens whose probabilities reach it
    (Holtzman et al. 2020, arXiv 1904.09751); `min_p` keeps tokens of at least this fraction of the likeliest one's
    probability (Nguyen et al. 2024, arXiv 2407.01082); `typical_p` keeps the smallest set of tokens that reaches it of
    those whose surprise is nearest to the entropy (Meister et al. 2023, arXiv 2202.00666).

    `seed` makes the choice repeatable; None draws one. `stop` strings end the text before they appear. `ignore_end`
    goes on after an end token. `alternatives` asks for log-probabilities: None for none, 0 for the chosen token's,
    n for the n likeliest as well.

    `completions` asks for so many of one prompt. Each is the one that a request alone would give: with a `seed`, number
    i has the seed `seed + i`, modulo 2^64. With `beams` they are the best that a beam search finds: no token is drawn
    then, penalties and biases are applied to log-probabilities, and all is told at the end.

    `guesses` is the most tokens that are guessed ahead at a step, from what followed the same words before, and checked
    together: it changes how long the completion takes and nothing else. None leaves it to the engine.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    grammar: Grammar | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    alternatives: int | None = None
    completions: int = 1
    beams: Beams | None = None
    guesses: int | None = None

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 1, None)
        _number("temperature", self.temperature, 0.0, None)
        _whole("top_k", self.top_k, 0, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("typical_p", self.typical_p, 0.0, 1.0)
        for name in ("top_p", "typical_p"):
            if getattr(self, name) == 0:
                raise InvalidValue.of(name, 0.0, "a number above 0, up to 1")
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, SEED_LIMIT - 1)
        _number("repetition_penalty", self.repetition_penalty, 0.0, None)
        if self.repetition_penalty == 0:
            raise InvalidValue.of("repetition_penalty", self.repetition_penalty, "a finite number above 0")
        for name in ("frequency_penalty", "presence_penalty"):
            _number(name, getattr(self, name), -LARGEST_PENALTY, LARGEST_PENALTY)
        self._check_bias()
        _whole("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        if self.grammar is not None and (self.ignore_end or self.min_new_tokens):
            other = "ignore_end" if self.ignore_end else "min_new_tokens"
            raise InvalidValue.of(other, getattr(self, other), "left out, as the grammar says where the text ends")
        if self.alternatives is not None:
            _whole("alternatives", self.alternatives, 0, MOST_ALTERNATIVES)
        _whole("completions", self.completions, 1, MOST_COMPLETIONS)
        if self.guesses is not None:
            _whole("guesses", self.guesses, 0, MOST_GUESSES)
        self._check_stops()
        self._check_beams()

    @cached_property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken as it is, without looking at what was seen."""
        edited = self.counted or self.repetition_penalty != 1 or bool(self.logit_bias) or self.grammar is not None
        return self.temperature == 0 and not edited and self.min_new_tokens == 0

    @cached_property
    def needs_logits(self) -> bool:
        """Whether anything but the likeliest token is asked for."""
        return not self.greedy or self.alternatives is not None or self.beams is not None

    @property
    def counted(self) -> bool:
        """Whether it matters how often a token was generated."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MOST_BIASES:
            raise InvalidValue.of("logit_bias", f"{len(self.logit_bias)} tokens", f"at most {MOST_BIASES}")
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, None)
            _number(f"logit_bias[{token}]", bias, -LARGEST_BIAS, LARGEST_BIAS)

    def _check_beams(self) -> None:
        if self.beams is None:
            return
        if self.completions > self.beams.width:
            raise InvalidValue.of(
                "completions", self.completions, f"at most {self.beams.width}, the width of the beams"
            )
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise InvalidValue.of(name, value, "left out with beams, which draw nothing")

    def _check_stops(self) -> None:
        # A caller without a type checker may give one string, or a list.
        given: Any = self.stop
        stops: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(given)
        object.__setattr__(self, "stop", stops)
        if len(stops) > MOST_STOPS:
            raise InvalidValue.of("stop", f"{len(stops)} strings", f"at most {MOST_STOPS}")
        for i, text in enumerate(stops):
            if not isinstance(text, str) or not text:
                raise InvalidValue.of(f"stop[{i}]", text, "a string that is not empty")


def _whole(field: str, value: Any, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise InvalidValue.of(field, value, f"a whole number from {least}" + (f" to {most}" if most else ""))


def _number(field: str, value: Any, least: float, most: float | None) -> None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not known or value < least or (most is not None and value > most):
        raise InvalidValue.of(field, value, f"a finite number from {least:g}" + (f" to {most:g}" if most else ""))
