"""The families of encoders that are trained with a head, as the catalogue offers them. Imports no torch until asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core import ModelFamily
from attn_core.errors import InvalidValue

from attn_models.encoder.config import EncoderConfig


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
        from attn_models.encoder.encoder import Encoder
        from attn_models.encoder.masked import MaskedLanguageModel

        return MaskedLanguageModel(Encoder(config))


class ReformerFamily(ModelFamily):
    """Reversible blocks and BERT's head."""

    name = "reformer_lm"
    summary = "The Reformer's reversible blocks over hashed attention; it guesses masked tokens (Kitaev et al. 2020)."
    learns: ClassVar[str] = "masked"

    def configure(self, values: Mapping[str, Any]) -> Any:
        """The Reformer of plain values; raises `Incompatible` for one that its checkpoints cannot say."""
        from attn_models.encoder.headed import door_for
        from attn_models.encoder.reformer import ReformerConfig

        config = ReformerConfig.from_plain(values)
        door_for(config)
        return config

    def build(self, config: Any) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.masked import MaskedLanguageModel
        from attn_models.encoder.reformer import Reformer

        return MaskedLanguageModel(Reformer(config))


class TaggerFamily(ModelFamily):
    """An encoder and a tag for each word."""

    name = "tagger"
    summary = "An encoder over any mechanism that sees both ways; it names the tag of each word (Devlin et al. 2019)."
    learns: ClassVar[str] = "tags"

    def configure(self, values: Mapping[str, Any]) -> Any:
        """The tagger of an encoder's plain values and `classes`."""
        from attn_models.encoder.tagger import TaggerConfig

        encoder = {name: value for name, value in values.items() if name != "classes"}
        return TaggerConfig(encoder=checked(EncoderConfig.from_plain(encoder)), classes=values.get("classes", 0))

    def build(self, config: Any) -> Any:
        """A fresh tagger with random weights."""
        from attn_models.encoder.tagger import Tagger

        return Tagger(config)


def checked(config: EncoderConfig) -> EncoderConfig:
    """The encoder; raises what its mechanisms do where they do not fit."""
    from attn_models.encoder.block import attention_of

    for layer in range(config.layers):
        attention_of(config, layer)
    return config


def encoder_families() -> list[ModelFamily]:
    """One of each."""
    return [MaskedFamily(), ReformerFamily(), TaggerFamily()]
