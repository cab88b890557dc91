"""What the blocks of an encoder are made of, whatever it reads: words or patches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from attn_models.decoder.checks import require_choice, require_word
from attn_models.decoder.config import AttentionChoice, DecoderConfig

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class EncoderShape(ABC):
    """Blocks of attention both ways and feed-forward.

    `mechanism` and its `options` are used by every layer, or layer i uses `pattern[i % len(pattern)]` where a pattern
    is given. `head_size` defaults to `width / heads`. Raises `InvalidValue` for a field outside its range.
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
    norm_place: ClassVar[str]
    attention_bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_choice(self.mechanism, self.options)
        require_word("feed_forward", self.feed_forward, ACTIVATIONS)
        _ = self.block

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
            bias=True,
        )
