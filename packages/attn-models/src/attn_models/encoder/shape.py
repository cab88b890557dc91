"""What the blocks of an encoder are made of, whatever it reads: words or patches."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from attn_models.decoder.checks import plain_fields, require_choice, require_word, whole
from attn_models.decoder.config import AttentionChoice, DecoderConfig

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class EncoderShape(ABC):
    """Blocks of attention both ways and feed-forward.

    `mechanism` and its `options` are used by every layer, or layer i uses `pattern[i % len(pattern)]` where a pattern
    is given. `head_size` defaults to `width / heads`. `attention_dropout` acts in training on attention weights. `noun`
    calls it by name with its article, and `pairs` are fields of two numbers. Raises `InvalidValue` for a field
    outside its range.
    """

    width: int
    layers: int
    heads: int
    hidden: int
    head_size: int | None = None
    mechanism: str = "mha"
    options: Mapping[str, Any] = field(default_factory=dict)
    pattern: tuple[AttentionChoice, ...] = ()
    feed_forward: str = "gelu"
    norm_eps: float = 1e-12
    attention_dropout: float = 0.0
    norm_place: ClassVar[str]
    attention_bias: ClassVar[bool] = True
    noun: ClassVar[str]
    pairs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require_choice(self.mechanism, self.options)
        require_word("feed_forward", self.feed_forward, ACTIVATIONS)
        _ = self.block

    def plain(self) -> dict[str, Any]:
        """The config as plain values, which `from_plain` turns back."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        choices = [{"mechanism": choice.mechanism, "options": dict(choice.options)} for choice in self.pattern]
        return values | {"options": dict(self.options), "pattern": choices}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """The config of plain values, such as JSON's, whose whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        plain = plain_fields(cls, values, cls.noun)
        plain |= {name: tuple(map(whole, plain[name])) for name in cls.pairs if isinstance(plain.get(name), list)}
        pattern = tuple(AttentionChoice.from_plain(item) for item in plain.get("pattern") or ())
        return cls(**plain | {"pattern": pattern})

    @property
    @abstractmethod
    def kinds(self) -> int:
        """How many different tokens it reads, or classes it tells apart."""

    @property
    @abstractmethod
    def places(self) -> int:
        """The rows of the longest sequence that its blocks see."""

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each layer."""
        return tuple(self.choice(layer).mechanism for layer in range(self.layers))

    def choice(self, layer: int) -> AttentionChoice:
        """The mechanism and options of one layer."""
        if self.pattern:
            return self.pattern[layer % len(self.pattern)]
        return AttentionChoice(mechanism=self.mechanism, options=self.options)

    @property
    def block(self) -> DecoderConfig:
        """The sizes of norms and feed-forwards, which are those of any Transformer."""
        return DecoderConfig(
            vocabulary=self.kinds,
            context=self.places,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            head_size=self.head_size,
            hidden=self.hidden,
            feed_forward=self.feed_forward,
            norm_place=self.norm_place,
            norm_eps=self.norm_eps,
            attention_dropout=self.attention_dropout,
            bias=True,
        )
