"""Configs of recurrent language models."""

from __future__ import annotations

from dataclasses import dataclass

from attn_schema.decoder import Dropout, Layers, SequenceConfig, SingleAttentionConfig, Size

from attn_models.attention import LayerAttention, decoder_attention


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(SequenceConfig, SingleAttentionConfig):
    """Fields of all recurrent language models: `num_layers` layers of one `mechanism` over hidden states of
    `hidden_size`, with `num_heads` heads and its `options`.

    A head has `head_dim` elements, by default `hidden_size / num_heads`; `dropout` applies in training. There are no
    residual connections or norms between the layers.
    """

    head_dim: Size | None = None
    num_layers: Layers = 1
    dropout: Dropout = 0.0

    @property
    def entering(self) -> int:
        """The size of token embeddings."""
        return self.hidden_size

    @property
    def lstms(self) -> int:
        """The number of LSTM layers below the mechanism."""
        return 0


@dataclass(frozen=True, kw_only=True)
class KeyValueConfig(RecurrentConfig):
    """An LSTM that attends to its last few outputs (Daniluk et al. 2017).

    Below the attention there are `num_lstm_layers` LSTM layers over token embeddings of `embedding` elements.
    `mechanism` is "key_value_predict" or "key_value", or any other causal one.
    """

    embedding: Size
    num_lstm_layers: Layers = 1
    mechanism: str = "attn-variants/key_value_predict"

    @property
    def entering(self) -> int:
        """The size of token embeddings."""
        return self.embedding

    @property
    def lstms(self) -> int:
        """The number of LSTM layers below the attention."""
        return self.num_lstm_layers


@dataclass(frozen=True, kw_only=True)
class LstmnConfig(RecurrentConfig):
    """LSTM layers that attend to the tapes of all their earlier states (Cheng et al. 2016)."""

    mechanism: str = "attn-variants/lstmn"


@dataclass(frozen=True, kw_only=True)
class TuringConfig(RecurrentConfig):
    """A controller with a memory (Graves et al. 2014) of as many rows of size `head_dim` as the option `slots` says."""

    mechanism: str = "attn-variants/ntm"


def attention_of(config: RecurrentConfig) -> LayerAttention:
    """The attention of every layer; raises the errors of `decoder_attention`."""
    sizes = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_seq_len": config.max_seq_len,
    }
    return decoder_attention(config.mechanism, config.options, **sizes)
