"""Configs of encoders of text (BERT, ModernBERT, Reformer), images (ViT) and both (CLIP)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from attn_core import Rotary
from attn_core.checks import require_choice
from attn_core.errors import InvalidValue
from attn_core.rotary import rotary_scaling
from attn_schema.decoder import GATED, AttentionConfig, BlockConfig, FeedForwardKind, SequenceConfig, Size
from attn_schema.schema import MAX_INT32, PlainConfig
from msgspec import Meta

from attn_models.attention import LayerAttention, decoder_attention, encoder_attention

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")
Pair = Annotated[tuple[Size, Size], Meta(min_length=2, max_length=2)]


@dataclass(frozen=True, kw_only=True)
class EncoderShape(AttentionConfig):
    """Base class of encoder configs: blocks of attention, usually bidirectional, and feed-forward layers.

    `intermediate_size` is the inner size of the feed-forwards; a subclass lists the activations that it has in
    `feed_forwards`. Raises `InvalidValue` for a field outside its range.
    """

    intermediate_size: Size
    feed_forward: FeedForwardKind = "gelu"
    norm_eps: Annotated[float, Meta(ge=0)] = 1e-12
    bias: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    feed_forwards: ClassVar[tuple[str, ...]] = ACTIVATIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("feed_forward", self.feed_forward, self.feed_forwards)

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """The size of the vocabulary, or the number of classes."""

    @property
    @abstractmethod
    def sequence_length(self) -> int:
        """The length of the longest sequence that its blocks process."""

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each layer."""
        return tuple(self.choice(layer).mechanism for layer in range(self.num_layers))

    @property
    def block(self) -> BlockConfig:
        """The config of norms and feed-forwards, which are built as in a decoder."""
        return BlockConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            feed_forward=self.feed_forward,
            norm_eps=self.norm_eps,
            bias=self.bias,
            feed_forward_bias=self.has_bias("feed_forward_bias"),
        )

    def has_bias(self, part: str) -> bool:  # noqa: ARG002 -- of some, parts differ
        """Whether a part of a block has biases: "attention_bias" or "feed_forward_bias"."""
        return self.bias

    def rotary(self, layer: int) -> Rotary | None:  # noqa: ARG002 -- most have none
        """The rotary positions of a layer, if any."""
        return None


@dataclass(frozen=True, kw_only=True)
class TextEncoderShape(EncoderShape, SequenceConfig):
    """Base class of configs of encoders of token ids."""

    @property
    def num_outputs(self) -> int:
        """The size of the vocabulary."""
        return self.vocab_size

    @property
    def sequence_length(self) -> int:
        """The longest sequence, in tokens."""
        return self.max_seq_len


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(TextEncoderShape):
    """Blocks over token, position and segment embeddings (BERT's architecture).

    `type_vocab_size` is the number of token types (segments) of an input, 0 for none. `positions` "every" numbers all
    tokens of a sequence from 0 (BERT); "real" numbers only real tokens, not padding, from `first_position` (RoBERTa);
    "depth" combines positions with depths in a dependency tree, which are then an argument of the model; "rotary"
    turns queries and keys, with `rope_theta` and `rope_scaling` as in `DecoderConfig`; with "none" only the attention
    knows positions. With `embedding_size`, embeddings have that size and a linear layer maps them to `hidden_size`
    (ALBERT). `repeats` has the block that each layer computes; by default layer i computes block i. With
    `shared_biases`, all blocks share the learned biases of their scores. `attention_bias` and `feed_forward_bias` say
    whether these parts have biases. With `conv_kernel_size`, the first layer's output is added to a convolution of the
    embeddings of that many neighbouring tokens, in `conv_groups` groups of channels, after the activation `conv_act`
    (DeBERTa-v2). Raises `InvalidValue` for a field outside its range.
    """

    type_vocab_size: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 2
    positions: Literal["every", "real", "depth", "rotary", "none"] = "every"
    first_position: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    embedding_size: Size | None = None
    repeats: tuple[int, ...] = ()
    shared_biases: bool = False
    rope_theta: Annotated[float, Meta(ge=1)] = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = True
    feed_forward_bias: bool = True
    conv_kernel_size: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    conv_groups: Size = 1
    conv_act: Literal["tanh", "gelu", "gelu_tanh", "relu"] = "tanh"
    feed_forwards: ClassVar[tuple[str, ...]] = (*ACTIVATIONS, *GATED)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rotary(0)
        if self.conv_kernel_size and not self.conv_kernel_size % 2:
            raise InvalidValue.of("conv_kernel_size", self.conv_kernel_size, "0 or an odd number of tokens")
        if self.hidden_size % self.conv_groups:
            raise InvalidValue.of("conv_groups", self.conv_groups, f"a divisor of hidden_size {self.hidden_size}")
        if self.repeats and (len(self.repeats) != self.num_layers or set(self.repeats) != set(range(self.num_blocks))):
            allowed = f"for each of {self.num_layers} layers the number of a block, of which none is left out"
            raise InvalidValue.of("repeats", list(self.repeats), allowed)
        if (self.positions == "real") != (self.first_position > 0):
            allowed = "a whole number from 1 where positions are 'real', else 0"
            raise InvalidValue.of("first_position", self.first_position, allowed)

    @property
    def embedding_width(self) -> int:
        """The size of the embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def num_blocks(self) -> int:
        """The number of blocks, each of which one layer or several compute."""
        return max(self.repeats) + 1 if self.repeats else self.num_layers

    def has_bias(self, part: str) -> bool:
        """Whether a part of a block has biases: "attention_bias" or "feed_forward_bias"."""
        biased: bool = getattr(self, part)
        return biased

    def rotary(self, layer: int) -> Rotary | None:  # noqa: ARG002 -- all layers have the same
        """The rotary positions of all layers, if any."""
        scaling = None if self.rope_scaling is None else rotary_scaling(self.rope_scaling)
        return Rotary(base=self.rope_theta, scaling=scaling) if self.positions == "rotary" else None


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(PlainConfig):
    """A classifier of tokens or of texts: its encoder and the number of `classes`; raises `InvalidValue` unless that is
    from 1."""

    encoder: EncoderConfig
    classes: Size


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(TextEncoderShape):
    """Reversible blocks over token and position embeddings.

    With `axial_pos_shape` (rows, columns), the embedding of position p is the vector of row p // columns concatenated
    with that of column p % columns, of the two sizes `axial_pos_embds_dim`; otherwise each of the `max_seq_len`
    positions has its own vector. Raises `InvalidValue` for a field outside its range.
    """

    axial_pos_shape: Pair | None = None
    axial_pos_embds_dim: Pair | None = None

    def has_bias(self, part: str) -> bool:
        """Whether a part of a block has biases: all but the attention."""
        return part != "attention_bias"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axial_pos_shape is None and self.axial_pos_embds_dim is None:
            return
        for name in ("axial_pos_shape", "axial_pos_embds_dim"):
            if getattr(self, name) is None:
                raise InvalidValue.of(
                    name, None, "two whole numbers, or neither axial_pos_shape nor axial_pos_embds_dim"
                )
        if self.axial_pos_shape is not None and math.prod(self.axial_pos_shape) < self.max_seq_len:
            raise InvalidValue.of(
                "axial_pos_shape",
                self.axial_pos_shape,
                f"two numbers whose product is at least max_seq_len {self.max_seq_len}",
            )
        if self.axial_pos_embds_dim is not None and sum(self.axial_pos_embds_dim) != self.hidden_size:
            raise InvalidValue.of(
                "axial_pos_embds_dim",
                self.axial_pos_embds_dim,
                f"two numbers whose sum is hidden_size {self.hidden_size}",
            )


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(TextEncoderShape):
    """Pre-norm blocks with gated feed-forwards, without biases, over token embeddings and rotary positions.

    `rope_theta` and `rope_scaling` are those of layers that attend to all tokens, `local_rope_theta` and
    `local_rope_scaling` those of layers with a window; they mean the same as the fields of `DecoderConfig`. Raises
    `InvalidValue` for a field outside its range.
    """

    rope_theta: Annotated[float, Meta(ge=1)] = 160000.0
    rope_scaling: Mapping[str, Any] | None = None
    local_rope_theta: Annotated[float, Meta(ge=1)] = 10000.0
    local_rope_scaling: Mapping[str, Any] | None = None
    bias: ClassVar[bool] = False
    feed_forwards: ClassVar[tuple[str, ...]] = GATED

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer in range(self.num_layers):
            self.rotary(layer)

    def rotary(self, layer: int) -> Rotary:
        """The rotary positions of a layer."""
        local = "window" in self.choice(layer).options
        scaling = self.local_rope_scaling if local else self.rope_scaling
        return Rotary(
            base=self.local_rope_theta if local else self.rope_theta,
            scaling=None if scaling is None else rotary_scaling(scaling),
        )


@dataclass(frozen=True, kw_only=True)
class VisionConfig(EncoderShape):
    """A vision Transformer for square images with sides of `image` pixels and `channels` channels, split into patches
    with sides of `patch` pixels.

    `classes` is the number of labels. Raises `InvalidValue` for a field outside its range, and for patches that do not
    divide the image.
    """

    image: Size
    patch: Size
    classes: Size
    channels: Size = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise InvalidValue.of("patch", self.patch, f"a divisor of the image's side of {self.image} pixels")

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return (self.image // self.patch) ** 2

    @property
    def num_outputs(self) -> int:
        """The number of classes."""
        return self.classes

    @property
    def sequence_length(self) -> int:
        """The number of patches plus one for the class token."""
        return self.patches + 1


def attention_of(config: EncoderShape, layer: int) -> LayerAttention:
    """The attention of one layer; raises the errors of `encoder_attention` or, for a causal encoder, those of
    `decoder_attention`."""
    choice = config.choice(layer)
    found = decoder_attention if config.causal else encoder_attention
    return found(
        choice.mechanism,
        choice.options,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        bias=config.has_bias("attention_bias"),
        max_seq_len=config.sequence_length,
        layer=layer,
        rotary=config.rotary(layer),
        dropout=config.attention_dropout,
    )


CLIP_ACTIVATIONS = (*ACTIVATIONS, "quick_gelu")


@dataclass(frozen=True, kw_only=True)
class ClipTextConfig(TextEncoderShape):
    """CLIP's text tower: causal pre-norm blocks over token and position embeddings, projected to `size` elements.

    `end_id` is the id of the end token, whose output is the vector of the text. Raises `InvalidValue` for a field
    outside its range.
    """

    size: Size
    end_id: Annotated[int, Meta(ge=0, le=MAX_INT32)]
    causal: ClassVar[bool] = True
    feed_forwards: ClassVar[tuple[str, ...]] = CLIP_ACTIVATIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end_id >= self.vocab_size:
            raise InvalidValue.of("end_id", self.end_id, f"a token id from 0 to {self.vocab_size - 1}")


@dataclass(frozen=True, kw_only=True)
class SiglipTextConfig(TextEncoderShape):
    """SigLIP's text tower: pre-norm blocks over token and position embeddings, whose last output is projected to `size`
    elements. Texts are padded to `max_seq_len` tokens by `pad_id`, which are attended to as any token."""

    size: Size
    pad_id: Annotated[int, Meta(ge=0, le=MAX_INT32)]
    feed_forwards: ClassVar[tuple[str, ...]] = CLIP_ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class ImageEncoderConfig(EncoderShape):
    """An image tower of CLIP's kind: as `VisionConfig`, but without classes, and patches need not divide the image: a
    remainder at its edge is left out.

    With `class_token`, the output is that of a first token; else a learned query attends to those of all patches
    (SigLIP). `size` projects it, if given. `embedding_norm` normalises inputs, `patch_bias` is that of the patches'
    projection, and with `layer_scale` the results of attention and feed-forwards are multiplied by learned vectors
    (DINOv2). With `interpolate`, images may have other sides: the table of positions is resized.
    """

    image: Size
    patch: Size
    size: Size | None = None
    channels: Size = 3
    class_token: bool = True
    embedding_norm: bool = False
    patch_bias: bool = True
    layer_scale: bool = False
    interpolate: bool = False
    feed_forwards: ClassVar[tuple[str, ...]] = (*CLIP_ACTIVATIONS, *GATED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patch > self.image:
            raise InvalidValue.of("patch", self.patch, f"at most the image's side of {self.image} pixels")

    @property
    def side(self) -> int:
        """The number of patches along a side of an image."""
        return self.image // self.patch

    @property
    def num_outputs(self) -> int:
        """The number of elements of an image's vector."""
        return self.size or self.hidden_size

    @property
    def sequence_length(self) -> int:
        """The number of patches, and one for the class token."""
        return self.side**2 + self.class_token


@dataclass(frozen=True, kw_only=True)
class ClipImageConfig(ImageEncoderConfig):
    """CLIP's image tower, projected to `size` elements."""

    size: Size
    embedding_norm: bool = True
    patch_bias: bool = False
