"""Mistral checkpoints: Llama's layout with a sliding window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core import Causal, Mask, Window
from attn_core.errors import Incompatible

from attn_models.decoder.config import DecoderConfig
from attn_models.families.llama import READS, LlamaDoor


class MistralDoor(LlamaDoor):
    """Llama with a window of w tokens, the query's own among them (Jiang et al. 2023, arXiv 2310.06825)."""

    model_type = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    reads = READS | {"sliding_window"}
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a MistralConfig; `sliding_window` null means none, a missing key their default."""
        values = {**self.defaults, **values}
        config = super().configure(values)
        window = values.get("sliding_window")
        if window is None:
            return config
        return dataclasses.replace(config, mechanism="sliding_window", options={"window": window})

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """A MistralConfig."""
        if config.bias:
            raise Incompatible(f"biases cannot be said in a {self.model_type} config.json")
        window = config.options.get("window")
        return super().describe(config) | {"architectures": [self.architecture], "sliding_window": window}

    def mask(self, config: DecoderConfig) -> Mask:
        """The window that the options name, else all that came before."""
        window = config.options.get("window")
        return Causal() if window is None else Window(left=window - 1)
