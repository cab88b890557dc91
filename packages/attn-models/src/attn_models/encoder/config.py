"""Configs of encoders of text (BERT, ModernBERT, Reformer), images (ViT) and both (CLIP)."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from attn_core import Rotary
from attn_core.errors import InvalidValue
from attn_core.rotary import rotary_scaling

from attn_models.attention import LayerAttention, decoder_attention, encoder_attention
from attn_models.decoder.config import GATED, AttentionChoice, DecoderConfig
from attn_models.plain_config import plain_fields, require_between, require_choice, require_count, require_word, whole

ACTIVATIONS = ("gelu", "gelu_tanh", "relu")


@dataclass(frozen=True, kw_only=True)
class EncoderShape(ABC):
    """Base class of encoder configs: blocks of attention, usually bidirectional, and feed-forward layers.

    Every layer uses `mechanism` with its `options`, unless `pattern` is given: then layer i uses
    `pattern[i % len(pattern)]`. `head_dim` defaults to `hidden_size / num_heads`; `intermediate_size` is the inner size
    of the feed-forwards. `attention_dropout` drops attention weights in training. Subclasses set `noun`, their name
    with its article for error messages, and `pairs`, the names of fields that are pairs of numbers. Raises
    `InvalidValue` for a field outside its range.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    head_dim: int | None = None
    mechanism: str = "attn-variants/mha"
    options: Mapping[str, Any] = field(default_factory=dict)
    pattern: tuple[AttentionChoice, ...] = ()
    feed_forward: str = "gelu"
    norm_eps: float = 1e-12
    attention_dropout: float = 0.0
    norm_place: ClassVar[str]
    attention_bias: ClassVar[bool] = True
    bias: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    feed_forwards: ClassVar[tuple[str, ...]] = ACTIVATIONS
    noun: ClassVar[str]
    pairs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        require_choice(self.mechanism, self.options)
        require_word("feed_forward", self.feed_forward, self.feed_forwards)
        _ = self.block

    def plain(self) -> dict[str, Any]:
        """The config as plain values, the inverse of `from_plain`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        choices = [{"mechanism": choice.mechanism, "options": dict(choice.options)} for choice in self.pattern]
        return values | {"options": dict(self.options), "pattern": choices}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """The config from plain values such as JSON's, where whole numbers may be floats.

        Raises `UnknownName` for a field that does not exist, `InvalidValue` for a missing or bad one.
        """
        plain = plain_fields(cls, values, cls.noun)
        plain |= {name: tuple(map(whole, plain[name])) for name in cls.pairs if isinstance(plain.get(name), list)}
        pattern = tuple(AttentionChoice.from_plain(item) for item in plain.get("pattern") or ())
        return cls(**plain | {"pattern": pattern})

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

    def choice(self, layer: int) -> AttentionChoice:
        """The mechanism and options of one layer."""
        if self.pattern:
            return self.pattern[layer % len(self.pattern)]
        return AttentionChoice(mechanism=self.mechanism, options=self.options)

    @property
    def block(self) -> DecoderConfig:
        """The config of norms and feed-forwards, which are built as in a decoder."""
        return DecoderConfig(
            vocab_size=self.num_outputs,
            max_seq_len=self.sequence_length,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            feed_forward=self.feed_forward,
            norm_place=self.norm_place,
            norm_eps=self.norm_eps,
            attention_dropout=self.attention_dropout,
            bias=self.bias,
        )

    def rotary(self, layer: int) -> Rotary | None:  # noqa: ARG002 -- most have none
        """The rotary positions of a layer, if any."""
        return None


@dataclass(frozen=True, kw_only=True)
class TextEncoderShape(EncoderShape):
    """Base class of configs of encoders of token ids: a vocabulary, and the longest sequence in tokens."""

    vocab_size: int
    max_seq_len: int

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
    "depth" combines positions with depths in a dependency tree, which are then an argument of the model. Raises
    `InvalidValue` for a field outside its range.
    """

    type_vocab_size: int = 2
    positions: str = "every"
    first_position: int = 0
    norm_place: ClassVar[str] = "post"
    noun: ClassVar[str] = "an encoder"

    def __post_init__(self) -> None:
        if self.type_vocab_size != 0:
            require_count("type_vocab_size", self.type_vocab_size)
        require_word("positions", self.positions, ("every", "real", "depth"))
        first = self.first_position
        if type(first) is not int or first < 0 or (self.positions == "real") != (first > 0):
            allowed = "a whole number from 1 where positions are 'real', else 0"
            raise InvalidValue.of("first_position", self.first_position, allowed)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TaggerConfig:
    """A token classifier: its encoder and the number of `classes`; raises `InvalidValue` unless that is from 1."""

    encoder: EncoderConfig
    classes: int

    def __post_init__(self) -> None:
        require_count("classes", self.classes)


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(TextEncoderShape):
    """Reversible blocks over token and position embeddings.

    With `axial_pos_shape` (rows, columns), the embedding of position p is the vector of row p // columns concatenated
    with that of column p % columns, of the two sizes `axial_pos_embds_dim`; otherwise each of the `max_seq_len`
    positions has its own vector. Raises `InvalidValue` for a field outside its range.
    """

    axial_pos_shape: tuple[int, int] | None = None
    axial_pos_embds_dim: tuple[int, int] | None = None
    norm_place: ClassVar[str] = "pre"
    attention_bias: ClassVar[bool] = False
    noun: ClassVar[str] = "a Reformer"
    pairs: ClassVar[tuple[str, ...]] = ("axial_pos_shape", "axial_pos_embds_dim")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.axial_pos_shape is None and self.axial_pos_embds_dim is None:
            return
        for name in self.pairs:
            pair = getattr(self, name)
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidValue.of(
                    name, pair, "two whole numbers, or neither axial_pos_shape nor axial_pos_embds_dim"
                )
            for size in pair:
                require_count(name, size)
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

    rope_theta: float = 160000.0
    rope_scaling: Mapping[str, Any] | None = None
    local_rope_theta: float = 10000.0
    local_rope_scaling: Mapping[str, Any] | None = None
    norm_place: ClassVar[str] = "pre"
    attention_bias: ClassVar[bool] = False
    bias: ClassVar[bool] = False
    feed_forwards: ClassVar[tuple[str, ...]] = GATED
    noun: ClassVar[str] = "a ModernBERT"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rope_theta", "local_rope_theta"):
            require_between(name, getattr(self, name), 1.0, math.inf)
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

    image: int
    patch: int
    classes: int
    channels: int = 3
    norm_place: ClassVar[str] = "pre"
    noun: ClassVar[str] = "a vision Transformer"

    def __post_init__(self) -> None:
        for name in ("image", "patch", "classes", "channels"):
            require_count(name, getattr(self, name))
        if self.image % self.patch:
            raise InvalidValue.of("patch", self.patch, f"a divisor of the image's side of {self.image} pixels")
        super().__post_init__()

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
        bias=config.attention_bias,
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

    size: int
    end_id: int
    norm_place: ClassVar[str] = "pre"
    causal: ClassVar[bool] = True
    feed_forwards: ClassVar[tuple[str, ...]] = CLIP_ACTIVATIONS
    noun: ClassVar[str] = "a CLIP text tower"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("size", self.size)
        if type(self.end_id) is not int or not 0 <= self.end_id < self.vocab_size:
            raise InvalidValue.of("end_id", self.end_id, f"a token id from 0 to {self.vocab_size - 1}")


@dataclass(frozen=True, kw_only=True)
class ClipImageConfig(EncoderShape):
    """CLIP's image tower: as `VisionConfig`, but projected to `size` elements instead of classified. Patches need not
    divide the image: a remainder at its edge is left out."""

    image: int
    patch: int
    size: int
    channels: int = 3
    norm_place: ClassVar[str] = "pre"
    feed_forwards: ClassVar[tuple[str, ...]] = CLIP_ACTIVATIONS
    noun: ClassVar[str] = "a CLIP image tower"

    def __post_init__(self) -> None:
        for name in ("image", "patch", "size", "channels"):
            require_count(name, getattr(self, name))
        if self.patch > self.image:
            raise InvalidValue.of("patch", self.patch, f"at most the image's side of {self.image} pixels")
        super().__post_init__()

    @property
    def num_outputs(self) -> int:
        """The number of elements of an image's vector."""
        return self.size

    @property
    def sequence_length(self) -> int:
        """The number of patches plus one for the class token."""
        return (self.image // self.patch) ** 2 + 1
