"""What an encoder is made of, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue

from attn_models.decoder.checks import require_choice, require_count
from attn_models.decoder.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Blocks of attention both ways and feed-forward over token, position and segment embeddings (BERT's shape).

    `mechanism` and its `options` are used by every layer; `segments` is the number of kinds of sentence that an input
    may hold. Raises `InvalidValue` for a field outside its range.
    """

    vocabulary: int
    context: int
    width: int
    layers: int
    heads: int
    hidden: int
    segments: int = 2
    mechanism: str = "mha"
    options: Mapping[str, Any] = field(default_factory=dict)
    feed_forward: str = "gelu"
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        require_count("segments", self.segments)
        require_choice(self.mechanism, self.options)
        if self.feed_forward not in ("gelu", "gelu_tanh", "relu"):
            raise InvalidValue.of("feed_forward", self.feed_forward, "gelu, gelu_tanh or relu")
        _ = self.block

    @property
    def block(self) -> DecoderConfig:
        """The sizes of norms and feed-forwards, which are those of any Transformer."""
        return DecoderConfig(
            vocabulary=self.vocabulary,
            context=self.context,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            feed_forward=self.feed_forward,
            norm_place="post",
            norm_eps=self.norm_eps,
            bias=True,
        )
