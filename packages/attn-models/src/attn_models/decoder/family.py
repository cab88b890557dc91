"""The family `decoder`, as the catalogue offers it. Imports no torch until a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attn_core import ModelFamily

from attn_models.decoder.attention import layer_attentions
from attn_models.decoder.config import DecoderConfig

if TYPE_CHECKING:
    from attn_models.decoder.decoder import Decoder


class DecoderFamily(ModelFamily):
    """Language models of causal attention blocks."""

    name = "decoder"
    summary = "A causal language model over any mechanism: GPT-2 and Llama shapes, and what lies between."

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The config of plain values (fields of `DecoderConfig`), asked of the mechanisms it names too."""
        config = DecoderConfig.from_plain(values)
        layer_attentions(config)
        return config

    def build(self, config: DecoderConfig) -> Decoder:
        """A fresh decoder with random weights."""
        from attn_models.decoder.decoder import Decoder

        return Decoder(config)
