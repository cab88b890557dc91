"""The model families of encoders. Imports no torch until a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core import ModelFamily
from attn_core.errors import InvalidValue

from attn_models.encoder.config import ClassifierConfig, EncoderConfig, ReformerConfig, VisionConfig, attention_of


class MaskedFamily(ModelFamily):
    """BERT's encoder with its masked-language-model head."""

    name = "masked_lm"
    summary = "A masked language model over any bidirectional mechanism (BERT, Devlin et al. 2019)."
    learns: ClassVar[str] = "masked"

    def configure(self, values: Mapping[str, Any]) -> EncoderConfig:
        """The config from plain values; also raises the errors of `encoder_attention` for its mechanisms."""
        config = checked(EncoderConfig.from_plain(values))
        require_no_trees(config)
        return config

    def build(self, config: EncoderConfig) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.encoder import Encoder, MaskedLanguageModel

        return MaskedLanguageModel(Encoder(config))


class ReformerFamily(ModelFamily):
    """The Reformer's reversible blocks with BERT's masked-language-model head."""

    name = "reformer_lm"
    summary = "A masked language model of the Reformer's reversible blocks over LSH attention (Kitaev et al. 2020)."
    learns: ClassVar[str] = "masked"

    def configure(self, values: Mapping[str, Any]) -> Any:
        """The config from plain values; raises `Incompatible` for one that the checkpoint format cannot express."""
        from attn_models.adapters.registry import encoder_adapter_for

        config = ReformerConfig.from_plain(values)
        encoder_adapter_for(config)
        return config

    def build(self, config: Any) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.encoder import MaskedLanguageModel, Reformer

        return MaskedLanguageModel(Reformer(config))


class TaggerFamily(ModelFamily):
    """An encoder with a token classification head."""

    name = "tagger"
    summary = "A token classifier over any bidirectional mechanism (BERT, Devlin et al. 2019)."
    learns: ClassVar[str] = "tags"

    def configure(self, values: Mapping[str, Any]) -> Any:
        """The config from plain values: the fields of `EncoderConfig` and `classes`."""
        encoder = {name: value for name, value in values.items() if name != "classes"}
        return ClassifierConfig(encoder=checked(EncoderConfig.from_plain(encoder)), classes=values.get("classes", 0))

    def build(self, config: Any) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.encoder import Tagger

        return Tagger(config)


class TextClassifierFamily(TaggerFamily):
    """An encoder whose hidden states are pooled by additive attention, with a classification head."""

    name = "text_classifier"
    summary = "A text classifier over any bidirectional mechanism, pooled by additive attention (Yang et al. 2016)."
    learns: ClassVar[str] = "labels"

    def configure(self, values: Mapping[str, Any]) -> Any:
        """The config from plain values: the fields of `EncoderConfig` and `classes`."""
        config = super().configure(values)
        require_no_trees(config.encoder)
        return config

    def build(self, config: Any) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.encoder import TextClassifier

        return TextClassifier(config)


def require_no_trees(config: EncoderConfig) -> None:
    """Raise `InvalidValue` for positions that need a dependency tree, which a text has not."""
    if config.positions == "depth":
        raise InvalidValue.of("positions", config.positions, "'every' or 'real': a text has no dependency tree")


def checked(config: EncoderConfig) -> EncoderConfig:
    """Return the config unchanged after checking its mechanisms; raises the errors of `encoder_attention`."""
    for layer in range(config.num_layers):
        attention_of(config, layer)
    return config


def encoder_families() -> list[ModelFamily]:
    """One instance of each text encoder family."""
    return [MaskedFamily(), ReformerFamily(), TaggerFamily(), TextClassifierFamily()]


class VitFamily(ModelFamily):
    """Vision Transformers for image classification."""

    name = "vit"
    summary = (
        "A vision Transformer for image classification over any bidirectional mechanism (Dosovitskiy et al. 2021)."
    )
    learns: ClassVar[str] = "images"

    def configure(self, values: Mapping[str, Any]) -> VisionConfig:
        """The config from plain values; also raises the errors of `encoder_attention` for its mechanisms."""
        config = VisionConfig.from_plain(values)
        for layer in range(config.num_layers):
            attention_of(config, layer)
        return config

    def build(self, config: VisionConfig) -> Any:
        """A fresh model with random weights."""
        from attn_models.encoder.encoder import VisionTransformer

        return VisionTransformer(config)
