"""The mechanism of a recurrent language model, asked for by name. Imports no torch."""

from __future__ import annotations

from attn_models.decoder.attention import LayerAttention
from attn_models.encoder_decoder.attention import decoder_attention
from attn_models.recurrent.config import RecurrentConfig


def attention_of(config: RecurrentConfig) -> LayerAttention:
    """The mechanism of every layer; raises what `decoder_attention` raises."""
    sizes = {"width": config.width, "heads": config.heads, "head_size": config.head_size, "context": config.context}
    return decoder_attention(config.mechanism, config.options, **sizes)
