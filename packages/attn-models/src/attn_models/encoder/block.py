"""The two sublayers of an encoder's block, and the two places of their norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attn_models.decoder.attention import LayerAttention
from attn_models.decoder.feedforward import build_feed_forward
from attn_models.decoder.norms import build_norm
from attn_models.encoder.shape import EncoderShape
from attn_models.encoder_decoder.attention import encoder_attention


def attention_of(config: EncoderShape, layer: int) -> LayerAttention:
    """The attention of one layer; raises as `encoder_attention`."""
    choice = config.choice(layer)
    return encoder_attention(
        choice.mechanism,
        choice.options,
        width=config.width,
        heads=config.heads,
        head_size=config.head_size,
        bias=config.attention_bias,
        context=config.places,
        layer=layer,
        dropout=config.attention_dropout,
    )


class EncoderBlock(nn.Module):
    """Attention that sees both ways, a feed-forward, and a norm for each."""

    def __init__(self, config: EncoderShape, layer: int) -> None:
        super().__init__()
        chosen = attention_of(config, layer)
        # Any: what a mechanism builds is a module with the methods of AttentionLayer.
        self.attention: Any = chosen.mechanism.build(chosen.config)
        self.attention_norm = build_norm(config.block)
        self.feed_forward = build_feed_forward(config.block)
        self.feed_forward_norm = build_norm(config.block)


class PostNormBlock(EncoderBlock):
    """norm(x + attention(x)), then norm(x + feed-forward(x)) (Vaswani et al. 2017, section 3.1)."""

    def forward(self, hidden: Tensor, keep: Tensor | None) -> Tensor:
        """[batch, tokens, width] to [batch, tokens, width]; `keep` [batch, tokens] is True where a token is real."""
        after: Tensor = self.attention_norm(hidden + self.attention(hidden, keep=keep))
        out: Tensor = self.feed_forward_norm(after + self.feed_forward(after))
        return out


class ReversibleBlock(EncoderBlock):
    """y_1 = x_1 + attention(norm(x_2)), then y_2 = x_2 + feed-forward(norm(y_1)) (Kitaev et al. 2020, equation 9).

    What came in follows from what goes out, x_2 = y_2 - feed-forward(norm(y_1)) and so on; training here remembers it
    all the same.
    """

    def forward(self, one: Tensor, two: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Two streams [batch, tokens, width] each; `keep` as `PostNormBlock.forward`."""
        one = one + self.attention(self.attention_norm(two), keep=keep)
        return one, two + self.feed_forward(self.feed_forward_norm(one))


class PreNormBlock(EncoderBlock):
    """x + attention(norm(x)), then x + feed-forward(norm(x)) (Dosovitskiy et al. 2021, equations 2 and 3)."""

    def forward(self, hidden: Tensor, keep: Tensor | None = None) -> Tensor:
        """As `PostNormBlock.forward`."""
        after = hidden + self.attention(self.attention_norm(hidden), keep=keep)
        out: Tensor = after + self.feed_forward(self.feed_forward_norm(after))
        return out
