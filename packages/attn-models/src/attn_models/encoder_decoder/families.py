"""The model families of encoder-decoder models. Imports no torch until a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from attn_core import ModelFamily

from attn_models.attention import cross_attention, decoder_attention, encoder_attention
from attn_models.encoder_decoder.config import (
    BottleneckConfig,
    EncoderDecoderConfig,
    LuongConfig,
    RnnsearchConfig,
    ShowAttendTellConfig,
    T5Config,
    TransformerConfig,
    attention_of,
)


class EncoderDecoderFamily(ModelFamily):
    """Base class of families: a subclass sets its config class, and `built_by`, module and name of its model class."""

    Config: ClassVar[type[EncoderDecoderConfig]]
    built_by: ClassVar[tuple[str, str]]

    def configure(self, values: Mapping[str, Any]) -> EncoderDecoderConfig:
        """The config from plain values; also raises the errors of `check`."""
        config = self.Config.from_plain(values)
        self.check(config)
        return config

    def check(self, config: Any) -> None:
        """Raise an error for a mechanism that does not fit; by default nothing is checked."""

    def build(self, config: Any) -> Any:
        """A fresh model with random weights."""
        module, name = self.built_by
        return getattr(import_module(module), name)(config)


class BottleneckFamily(EncoderDecoderFamily):
    """Sequence to sequence with LSTMs, without attention."""

    name = "bottleneck"
    summary = "Sequence to sequence through the last state of an LSTM, without attention (Sutskever et al. 2014)."
    Config = BottleneckConfig
    built_by = ("attn_models.encoder_decoder.translation", "Bottleneck")


class SteppedFamily(EncoderDecoderFamily):
    """Base class of recurrent families with attention over the states of the encoder."""

    def check(self, config: Any) -> None:
        """Check the mechanism over annotations."""
        attention_of(config)


class RnnsearchFamily(SteppedFamily):
    """RNNsearch: recurrent translation with attention."""

    name = "rnnsearch"
    summary = "RNNsearch: recurrent translation over any cross-attention (Bahdanau et al. 2015)."
    Config = RnnsearchConfig
    built_by = ("attn_models.encoder_decoder.translation", "Rnnsearch")


class LuongFamily(SteppedFamily):
    """Luong's LSTM translation."""

    name = "luong"
    summary = "LSTM translation with global or local attention and input feeding (Luong et al. 2015)."
    Config = LuongConfig
    built_by = ("attn_models.encoder_decoder.translation", "Luong")


class TransformerFamily(EncoderDecoderFamily):
    """The encoder-decoder Transformer."""

    name = "transformer"
    summary = "The encoder-decoder Transformer over any three mechanisms (Vaswani et al. 2017)."
    Config: ClassVar[type[EncoderDecoderConfig]] = TransformerConfig
    built_by = ("attn_models.encoder_decoder.transformer", "Transformer")

    def check(self, config: Any) -> None:
        """Check the mechanisms of encoder self-attention, decoder self-attention and cross-attention."""
        sizes = config.attention_sizes
        encoder_attention(config.encoder, config.encoder_options, **sizes, max_seq_len=config.max_encoder_len)
        decoder_attention(config.decoder, config.decoder_options, **sizes, max_seq_len=config.max_seq_len)
        cross_attention(config.cross, config.cross_options, **sizes, max_seq_len=config.max_encoder_len)


class T5Family(TransformerFamily):
    """T5, with relative position biases."""

    name = "t5"
    summary = "T5: an encoder-decoder whose only positions are biases of distances (Raffel et al. 2020)."
    Config = T5Config
    built_by = ("attn_models.encoder_decoder.t5", "T5")


class ShowAttendTellFamily(SteppedFamily):
    """Show, Attend and Tell: image captions."""

    name = "show_attend_tell"
    summary = "Show, Attend and Tell: captions of images, over any cross-attention (Xu et al. 2015)."
    Config = ShowAttendTellConfig
    built_by = ("attn_models.encoder_decoder.show_attend_tell", "ShowAttendTell")


def encoder_decoder_families() -> list[ModelFamily]:
    """One instance of each encoder-decoder family."""
    return [
        BottleneckFamily(),
        RnnsearchFamily(),
        LuongFamily(),
        TransformerFamily(),
        T5Family(),
        ShowAttendTellFamily(),
    ]
