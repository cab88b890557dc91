"""The family of vision Transformers, as the catalogue offers it. Imports no torch until one is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core import ModelFamily

from attn_models.vision.config import VisionConfig


class VitFamily(ModelFamily):
    """Patches as words."""

    name = "vit"
    summary = "A vision Transformer over any mechanism that sees both ways; it names images (Dosovitskiy et al. 2021)."
    learns: ClassVar[str] = "images"

    def configure(self, values: Mapping[str, Any]) -> VisionConfig:
        """The model of plain values, asked of the mechanisms that it names too."""
        from attn_models.encoder.block import attention_of

        config = VisionConfig.from_plain(values)
        for layer in range(config.layers):
            attention_of(config, layer)
        return config

    def build(self, config: VisionConfig) -> Any:
        """A fresh model with random weights."""
        from attn_models.vision.vit import VisionTransformer

        return VisionTransformer(config)
