"""What an encoder-decoder Transformer is made of, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from attn_core.errors import InvalidValue

from attn_models.decoder.checks import require_choice, require_word
from attn_models.decoder.config import DecoderConfig
from attn_models.encoder_decoder.config import SourceConfig

PLACES = ("encoder", "decoder", "cross")
NORM_PLACES = ("post", "pre")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(SourceConfig):
    """`layers` blocks in the encoder and as many in the decoder (Vaswani et al. 2017); one embedding is used thrice.

    `encoder`, `decoder` and `cross` are the mechanisms of the three attentions, each with its `..._options`. `hidden`
    is the inner width of the feed-forward layers. `norm_place` "post" is the paper's, "pre" trains without warm-up.
    `attention_dropout` acts in training on the weights of all three.
    """

    layers: int
    heads: int
    hidden: int
    encoder: str = "mha"
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    decoder: str = "mha"
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    cross: str = "cross"
    cross_options: Mapping[str, Any] = field(default_factory=dict)
    norm_place: str = "post"
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_word("norm_place", self.norm_place, NORM_PLACES)
        for place in PLACES:
            require_choice(getattr(self, place), getattr(self, f"{place}_options"))
        if self.width % self.heads:
            raise InvalidValue.of("heads", self.heads, f"a divisor of the width {self.width}")

    @property
    def block(self) -> DecoderConfig:
        """The sizes of the parts that are those of any Transformer: norms, feed-forwards and positions."""
        return DecoderConfig(
            vocabulary=self.vocabulary,
            context=self.context,
            width=self.width,
            layers=self.layers,
            heads=self.heads,
            hidden=self.hidden,
            feed_forward="relu",
            positions="sinusoidal",
            bias=True,
        )
