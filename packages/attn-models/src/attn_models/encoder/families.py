"""The model families of encoders. Imports no torch until a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core import ModelFamily
from attn_core.errors import InvalidValue

from attn_models.encoder.config import EncoderConfig, ReformerConfig, TaggerConfig, VisionConfig, attention_of


class MaskedFamily(ModelFamily):
    """BERT's encoder and head."""

    name = "masked_lm"
    summary = "An encoder over any mechanism that sees both ways; it guesses masked tokens (Devlin et al. 2019)."
    learns: ClassVar[str] = "masked"

    def configure(self, values: Mapping[str, Any]) -> EncoderConfig:
        """The encoder of plain values, asked of the mechanisms that it names too."""
        config = checked(EncoderConfig.from_plain(values))
        if config.positions == "depth":
            raise InvalidValue.of("positions", config.positions, "'every' or 'real': a text has no tree")
        return config

    def build(self, config: EncoderConfig) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.encoder import Encoder, MaskedLanguageModel

        return MaskedLanguageModel(Encoder(config))


class ReformerFamily(ModelFamily):
    """Reversible blocks and BERT's head."""

    name = "reformer_lm"
    summary = "The Reformer's reversible blocks over hashed attention; it guesses masked tokens (Kitaev et al. 2020)."
    learns: ClassVar[str] = "masked"

    def configure(self, values: Mapping[str, Any]) -> Any:
        """The Reformer of plain values; raises `Incompatible` for one that its checkpoints cannot say."""
        from attn_models.adapters.registry import encoder_adapter_for

        config = ReformerConfig.from_plain(values)
        encoder_adapter_for(config)
        return config

    def build(self, config: Any) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.encoder import MaskedLanguageModel
        from attn_models.encoder.reformer import Reformer

        return MaskedLanguageModel(Reformer(config))


class TaggerFamily(ModelFamily):
    """An encoder and a tag for each word."""

    name = "tagger"
    summary = "An encoder over any mechanism that sees both ways; it names the tag of each word (Devlin et al. 2019)."
    learns: ClassVar[str] = "tags"

    def configure(self, values: Mapping[str, Any]) -> Any:
        """The tagger of an encoder's plain values and `classes`."""
        encoder = {name: value for name, value in values.items() if name != "classes"}
        return TaggerConfig(encoder=checked(EncoderConfig.from_plain(encoder)), classes=values.get("classes", 0))

    def build(self, config: Any) -> Any:
        """A fresh tagger with random weights."""
        from attn_models.encoder.encoder import Tagger

        return Tagger(config)


def checked(config: EncoderConfig) -> EncoderConfig:
    """The encoder; raises what its mechanisms do where they do not fit."""
    for layer in range(config.num_layers):
        attention_of(config, layer)
    return config


def encoder_families() -> list[ModelFamily]:
    """One of each."""
    return [MaskedFamily(), ReformerFamily(), TaggerFamily()]


class VitFamily(ModelFamily):
    """Patches as words."""

    name = "vit"
    summary = "A vision Transformer over any mechanism that sees both ways; it names images (Dosovitskiy et al. 2021)."
    learns: ClassVar[str] = "images"

    def configure(self, values: Mapping[str, Any]) -> VisionConfig:
        """The model of plain values, asked of the mechanisms that it names too."""
        config = VisionConfig.from_plain(values)
        for layer in range(config.num_layers):
            attention_of(config, layer)
        return config

    def build(self, config: VisionConfig) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.vit import VisionTransformer

        return VisionTransformer(config)
