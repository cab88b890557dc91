"""What a vision Transformer is made of, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue

from attn_models.decoder.checks import require_choice, require_count, require_word
from attn_models.decoder.config import DecoderConfig

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Square images of `image` pixels a side and `channels` numbers a pixel, cut into patches of `patch` pixels a side.

    `mechanism` and its `options` are used by every layer; `classes` are told apart. Raises `InvalidValue` for a field
    outside its range, and for patches that do not cover an image exactly.
    """

    image: int
    patch: int
    classes: int
    width: int
    layers: int
    heads: int
    hidden: int
    channels: int = 3
    mechanism: str = "mha"
    options: Mapping[str, Any] = field(default_factory=dict)
    feed_forward: str = "gelu"
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        for name in ("image", "patch", "classes", "channels"):
            require_count(name, getattr(self, name))
        require_choice(self.mechanism, self.options)
        require_word("feed_forward", self.feed_forward, ACTIVATIONS)
        if self.image % self.patch:
            raise InvalidValue.of("patch", self.patch, f"a divisor of the image's side of {self.image} pixels")
        _ = self.block

    @property
    def patches(self) -> int:
        """How many patches an image has."""
        return (self.image // self.patch) ** 2

    @property
    def block(self) -> DecoderConfig:
        """The sizes of norms and feed-forwards, which are those of any Transformer."""
        return DecoderConfig(
            vocabulary=self.classes,
            context=self.patches + 1,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            feed_forward=self.feed_forward,
            norm_eps=self.norm_eps,
            bias=True,
        )
