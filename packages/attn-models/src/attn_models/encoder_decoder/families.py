"""The families of models with a source, as the catalogue offers them. Imports no torch until a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from attn_core import ModelFamily

from attn_models.attention import cross_attention, decoder_attention, encoder_attention, stepped_attention
from attn_models.encoder_decoder.config import (
    BottleneckConfig,
    EncoderDecoderConfig,
    LuongConfig,
    RnnsearchConfig,
    ShowAttendTellConfig,
    TransformerConfig,
)


class EncoderDecoderFamily(ModelFamily):
    """A family with a `Config`, and the module and class that build it."""

    Config: ClassVar[type[EncoderDecoderConfig]]
    built_by: ClassVar[tuple[str, str]]

    def configure(self, values: Mapping[str, Any]) -> EncoderDecoderConfig:
        """The config of plain values, asked of the mechanisms it names too."""
        config = self.Config.from_plain(values)
        self.check(config)
        return config

    def check(self, config: Any) -> None:
        """Raise the error of a mechanism that does not fit; here there is none."""

    def build(self, config: Any) -> Any:
        """A fresh model with random weights."""
        module, name = self.built_by
        return getattr(import_module(module), name)(config)


class BottleneckFamily(EncoderDecoderFamily):
    """Two LSTMs and one vector."""

    name = "bottleneck"
    summary = "Sequence to sequence through the last state of an LSTM, without attention (Sutskever et al. 2014)."
    Config = BottleneckConfig
    built_by = ("attn_models.encoder_decoder.translation", "Bottleneck")


class RnnsearchFamily(EncoderDecoderFamily):
    """Bidirectional encoder and soft search."""

    name = "rnnsearch"
    summary = "Translation that learns to align, over any attention to a source (Bahdanau et al. 2015)."
    Config = RnnsearchConfig
    built_by = ("attn_models.encoder_decoder.translation", "Rnnsearch")

    def check(self, config: Any) -> None:
        """The mechanism, as wide as an annotation."""
        stepped_attention(
            config.mechanism, config.options, hidden_size=2 * config.hidden_size, num_heads=config.num_heads
        )


class LuongFamily(EncoderDecoderFamily):
    """LSTMs with global or local attention."""

    name = "luong"
    summary = "LSTM translation with global or local attention and input feeding (Luong et al. 2015)."
    Config = LuongConfig
    built_by = ("attn_models.encoder_decoder.translation", "Luong")

    def check(self, config: Any) -> None:
        """The mechanism, as wide as a state."""
        stepped_attention(config.mechanism, config.options, hidden_size=config.hidden_size, num_heads=config.num_heads)


class TransformerFamily(EncoderDecoderFamily):
    """Encoder and decoder blocks."""

    name = "transformer"
    summary = "Encoder and decoder of attention blocks, each attention by name (Vaswani et al. 2017)."
    Config = TransformerConfig
    built_by = ("attn_models.encoder_decoder.transformer", "Transformer")

    def check(self, config: Any) -> None:
        """The three mechanisms."""
        sizes = {"hidden_size": config.hidden_size, "num_heads": config.num_heads, "dropout": config.attention_dropout}
        encoder_attention(config.encoder, config.encoder_options, **sizes, max_seq_len=config.max_encoder_len)
        decoder_attention(config.decoder, config.decoder_options, **sizes, max_seq_len=config.max_seq_len)
        cross_attention(config.cross, config.cross_options, **sizes, max_seq_len=config.max_encoder_len)


class ShowAttendTellFamily(EncoderDecoderFamily):
    """Convolutions and an LSTM that looks at their grid."""

    name = "show_attend_tell"
    summary = "Captions of grids such as images, over any attention to a source (Xu et al. 2015)."
    Config = ShowAttendTellConfig
    built_by = ("attn_models.encoder_decoder.show_attend_tell", "ShowAttendTell")

    def check(self, config: Any) -> None:
        """The mechanism, as wide as an annotation."""
        stepped_attention(config.mechanism, config.options, hidden_size=config.features, num_heads=config.num_heads)


def encoder_decoder_families() -> list[ModelFamily]:
    """One of each."""
    return [BottleneckFamily(), RnnsearchFamily(), LuongFamily(), TransformerFamily(), ShowAttendTellFamily()]
