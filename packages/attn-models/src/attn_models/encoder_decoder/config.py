"""Configs of encoder-decoder models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from attn_core.errors import InvalidValue
from attn_schema.decoder import (
    BlockConfig,
    Dropout,
    FeedForwardKind,
    HeadsConfig,
    Layers,
    SequenceConfig,
    SingleAttentionConfig,
    Size,
    SourceConfig,
)
from msgspec import Meta

from attn_models.attention import LayerAttention, stepped_attention


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(SequenceConfig, SourceConfig):
    """Fields of all encoder-decoder models; encoder and decoder share one vocabulary.

    `max_seq_len` is the longest sequence of the decoder and `max_encoder_len` that of the encoder, in tokens.
    `hidden_size` is the size of the decoder's state or residual stream; `dropout` applies in training. Raises
    `InvalidValue` for a field outside its range.
    """

    dropout: Dropout = 0.0


@dataclass(frozen=True, kw_only=True)
class BottleneckConfig(EncoderDecoderConfig):
    """Two stacks of `num_layers` LSTMs (Sutskever et al. 2014); `embedding` is the size of token embeddings.

    `reverse_source` reverses the encoder's input.
    """

    embedding: Size
    num_layers: Layers = 1
    reverse_source: bool = True


@dataclass(frozen=True, kw_only=True)
class SteppedConfig(EncoderDecoderConfig, SingleAttentionConfig):
    """Fields of recurrent models with attention: `mechanism`, with `num_heads` heads and its `options`."""

    @property
    def attended(self) -> tuple[int, int]:
        """The size of the states that are attended to, and the most of them."""
        return self.hidden_size, self.max_encoder_len


def attention_of(config: SteppedConfig) -> LayerAttention:
    """The attention over the encoder's states; raises the errors of `stepped_attention`."""
    size, longest = config.attended
    sizes = {"hidden_size": size, "num_heads": config.num_heads, "max_seq_len": longest}
    return stepped_attention(config.mechanism, config.options, **sizes)


@dataclass(frozen=True, kw_only=True)
class RnnsearchConfig(SteppedConfig):
    """RNNsearch (Bahdanau et al. 2015). In the paper's letters, `hidden_size` is n, `embedding` m, and `maxout` l, the
    number of units before the output.

    Annotations have 2 n elements; `mechanism` attends to them, with `num_heads` heads and its `options`.
    """

    embedding: Size
    maxout: Size
    mechanism: str = "attn-variants/alignment"

    @property
    def attended(self) -> tuple[int, int]:
        """Annotations of both directions."""
        return 2 * self.hidden_size, self.max_encoder_len


@dataclass(frozen=True, kw_only=True)
class LuongConfig(BottleneckConfig, SteppedConfig):
    """LSTM stacks with attention after the last layer (Luong et al. 2015): `mechanism` is luong, local_m or local_p.

    `input_feeding` adds the attentional vector of a step to the input of the next.
    """

    mechanism: str = "attn-variants/luong"
    input_feeding: bool = True


@dataclass(frozen=True, kw_only=True)
class ShowAttendTellConfig(SteppedConfig):
    """Show, Attend and Tell (Xu et al. 2015): an image is a grid of `rows` times `columns` tokens, row after row.

    A CNN of `convolutions` layers computes `features` numbers for each cell; `mechanism` attends to the cells, with
    `num_heads` heads and its `options`. `hidden_size` is the size of the LSTM's state, `embedding` that of a word.
    `max_encoder_len` is the number of cells plus the end token. `doubly_stochastic` is the weight λ of the penalty that
    makes a caption attend to every cell about once (equation 14).
    """

    rows: Size
    columns: Size
    features: Size
    embedding: Size
    convolutions: Size = 3
    mechanism: str = "attn-variants/visual_soft"
    doubly_stochastic: Annotated[float, Meta(ge=0)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_encoder_len != self.cells + 1:
            allowed = f"{self.cells + 1}: {self.rows} rows of {self.columns} cells, and the end token"
            raise InvalidValue.of("max_encoder_len", self.max_encoder_len, allowed)

    @property
    def cells(self) -> int:
        """The number of cells of the grid."""
        return self.rows * self.columns

    @property
    def attended(self) -> tuple[int, int]:
        """The cells of an image."""
        return self.features, self.cells


@dataclass(frozen=True, kw_only=True)
class AttendingConfig(EncoderDecoderConfig, HeadsConfig):
    """Fields of all encoder-decoder Transformers: `num_layers` blocks in the encoder, and as many in the decoder.

    `encoder`, `decoder` and `cross` are the mechanisms of encoder self-attention, decoder self-attention and
    cross-attention, each with its `..._options`. `intermediate_size` is the inner width of the feed-forward layers.
    `attention_dropout` applies in training to the attention weights of all three.
    """

    num_layers: Layers
    intermediate_size: Size
    encoder: str = "attn-variants/mha"
    encoder_options: Mapping[str, Any] = field(default_factory=dict)
    decoder: str = "attn-variants/mha"
    decoder_options: Mapping[str, Any] = field(default_factory=dict)
    cross: str = "attn-variants/mha"
    cross_options: Mapping[str, Any] = field(default_factory=dict)
    attention_dropout: Dropout = 0.0
    attention_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if "head_dim" not in self.attention_sizes and self.hidden_size % self.num_heads:
            raise InvalidValue.of("num_heads", self.num_heads, f"a divisor of hidden_size {self.hidden_size}")

    @property
    def attention_sizes(self) -> dict[str, Any]:
        """The sizes and dropout that all three attentions have in common."""
        sizes = {"hidden_size": self.hidden_size, "num_heads": self.num_heads, "dropout": self.attention_dropout}
        return sizes | ({"bias": True} if self.attention_bias else {})

    @property
    def decoder_layers(self) -> int:
        """The number of blocks of the decoder."""
        return self.num_layers

    @property
    def pre_norm(self) -> bool:
        """Whether the input of a sublayer is normalised, not its sum with the residual."""
        return True

    @property
    def block(self) -> BlockConfig:
        """The config of norms and feed-forwards, which are built as in a decoder; those without a choice have ReLU."""
        return BlockConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            feed_forward=getattr(self, "feed_forward", "relu"),
            bias=True,
        )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(AttendingConfig):
    """The Transformer (Vaswani et al. 2017); encoder and decoder share one embedding.

    `norm_place` "post" is the paper's, "pre" trains without warm-up.
    """

    norm_place: Literal["post", "pre"] = "post"

    @property
    def pre_norm(self) -> bool:
        """Whether `norm_place` is "pre"."""
        return self.norm_place == "pre"


@dataclass(frozen=True, kw_only=True)
class PreNormTransformerConfig(AttendingConfig):
    """A pre-norm Transformer with `num_decoder_layers` blocks in the decoder, by default `num_layers`."""

    num_decoder_layers: Layers | None = None

    @property
    def decoder_layers(self) -> int:
        """The number of blocks of the decoder."""
        return self.num_decoder_layers or self.num_layers


@dataclass(frozen=True, kw_only=True)
class T5Config(PreNormTransformerConfig):
    """T5 (Raffel et al. 2020): pre-norm blocks with RMSNorm; positions are only encoded by learned relative biases.

    All blocks of a stack share one table of biases, unless `shared_biases` is false (UMT5). `head_dim` is the size of a
    head, independent of the width; the decoder has `num_decoder_layers` blocks, by default
    `num_layers`. The options of `encoder` and `decoder` are those of `t5_bias`. `feed_forward` is "relu" or another
    value of the same field of `DecoderConfig`. With `tie_word_embeddings` the embedding is also the unembedding;
    `scale_output` multiplies the input of the unembedding by 1/√width.
    """

    head_dim: Size
    encoder: str = "attn-variants/t5_bias"
    decoder: str = "attn-variants/t5_bias"
    norm_eps: Annotated[float, Meta(ge=0)] = 1e-6
    feed_forward: FeedForwardKind = "relu"
    tie_word_embeddings: bool = True
    scale_output: bool = True
    shared_biases: bool = True

    @property
    def attention_sizes(self) -> dict[str, Any]:
        """As in `AttendingConfig`, and the size of a head."""
        return super().attention_sizes | {"head_dim": self.head_dim}

    @property
    def block(self) -> BlockConfig:
        """The config of norms and feed-forwards, which are those of a decoder."""
        return BlockConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            feed_forward=self.feed_forward,
            norm="rms",
            norm_eps=self.norm_eps,
        )


@dataclass(frozen=True, kw_only=True)
class WhisperConfig(PreNormTransformerConfig):
    """Whisper (Radford et al. 2022): pre-norm blocks over log-Mel spectrograms of `num_mel_bins` numbers per frame.

    Every audio has 2 `max_encoder_len` frames, and the encoder computes one hidden state for two frames. The decoder
    has `num_decoder_layers` blocks, by default `num_layers`.
    """

    num_mel_bins: Size
    feed_forward: FeedForwardKind = "gelu"
    attention_bias: ClassVar[bool] = True

    @property
    def num_frames(self) -> int:
        """The number of frames of an audio."""
        return 2 * self.max_encoder_len


@dataclass(frozen=True, kw_only=True)
class BartConfig(PreNormTransformerConfig, TransformerConfig):
    """BART (Lewis et al. 2020) and its relatives: a Transformer with biases, `norm_place` "post" in BART.

    `positions` are "learned", tables of their own for encoder and decoder; "sinusoidal", all sines of a position before
    all cosines (Marian); or "tensor2tensor", of which the smallest frequency is exactly 1/10000 and the position of
    tokens with the id `padding_id` the zero vector (M2M-100). They are counted from `first_position`. Embeddings are
    multiplied by √hidden_size with `scale_embedding`, and normalised with `embedding_norm`; `output_bias` adds a
    constant to the logits.
    """

    positions: Literal["learned", "sinusoidal", "tensor2tensor"] = "learned"
    first_position: Annotated[int, Meta(ge=0)] = 0
    padding_id: Annotated[int, Meta(ge=0)] | None = None
    scale_embedding: bool = False
    embedding_norm: bool = True
    output_bias: bool = True
    feed_forward: FeedForwardKind = "gelu"
    attention_bias: ClassVar[bool] = True
