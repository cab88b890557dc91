"""The blocks of an encoder-decoder Transformer (Vaswani et al. 2017, figure 1)."""

from __future__ import annotations

from functools import partial
from typing import Any

from attn_core import Capability, LayerState, RaggedBatch
from torch import Tensor, nn

from attn_models.decoder.attention import LayerAttention
from attn_models.decoder.feedforward import build_feed_forward
from attn_models.encoder_decoder.sublayer import Inner, Residual
from attn_models.encoder_decoder.transformer_config import TransformerConfig
from attn_models.replay import replay_step
from attn_models.rows import require_rows


class EncoderBlock(nn.Module):
    """Self-attention over the source, then the feed-forward."""

    def __init__(self, config: TransformerConfig, chosen: LayerAttention) -> None:
        super().__init__()
        # Any: what a mechanism builds is a module with the methods of AttentionLayer.
        self.attention: Any = chosen.mechanism.build(chosen.config)
        self.around_attention = Residual(config)
        self.feed_forward = build_feed_forward(config.block)
        self.around_feed_forward = Residual(config)

    def forward(self, hidden: Tensor, keep: Tensor | None) -> Tensor:
        """[batch, source, width] to [batch, source, width]."""
        attended = self.around_attention(hidden, partial(self.attention, keep=keep))
        out: Tensor = self.around_feed_forward(attended, self.feed_forward)
        return out


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the source, then the feed-forward."""

    def __init__(self, config: TransformerConfig, own: LayerAttention, cross: LayerAttention) -> None:
        super().__init__()
        self.incremental = own.mechanism.can(Capability.INCREMENTAL)
        self.attention: Any = own.mechanism.build(own.config)
        self.around_attention = Residual(config)
        self.cross: Any = cross.mechanism.build(cross.config)
        self.around_cross = Residual(config)
        self.feed_forward = build_feed_forward(config.block)
        self.around_feed_forward = Residual(config)

    def forward(self, hidden: Tensor, memory: Tensor, keep: Tensor | None) -> Tensor:
        """Whole sequences [batch, tokens, width] over memory [batch, source, width]."""
        return self._through(hidden, self.attention, partial(self.cross, source=memory, keep=keep))

    def step(self, hidden: Tensor, batch: RaggedBatch, own: LayerState, source: LayerState) -> Tensor:
        """The new rows [tokens, width] of many requests."""

        def attend(rows: Tensor) -> Tensor:
            if self.incremental:
                return require_rows(self.attention.step(rows, batch, own), rows)
            return require_rows(replay_step(self.attention, rows, batch, own), rows)

        def look(rows: Tensor) -> Tensor:
            return require_rows(self.cross.step(rows, batch, source), rows)

        return self._through(hidden, attend, look)

    def weights(self, hidden: Tensor, memory: Tensor) -> Tensor:
        """What the source attention looks at [batch, heads, tokens, source]."""
        attended = self.around_attention(hidden, self.attention)
        weights: Tensor = self.cross.weights(self.around_cross.entering(attended), memory)
        return weights

    def _through(self, hidden: Tensor, own: Inner, cross: Inner) -> Tensor:
        attended = self.around_attention(hidden, own)
        informed = self.around_cross(attended, cross)
        out: Tensor = self.around_feed_forward(informed, self.feed_forward)
        return out
