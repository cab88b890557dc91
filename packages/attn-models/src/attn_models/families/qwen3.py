"""Qwen 3 checkpoints: Llama's layout with normed queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attn_core.errors import Incompatible

from attn_models.decoder.attention import layer_attentions
from attn_models.decoder.config import DecoderConfig
from attn_models.families.door import refuse_others
from attn_models.families.gemma import Gemma2Door
from attn_models.families.layers import MECHANISM, gemma_options
from attn_models.families.llama import BLOCK, FIXED, READS, LlamaDoor
from attn_models.families.said import require_fields, rope_of_all, sizes_of


class Qwen3Door(LlamaDoor):
    """Llama with RMSNorm on the queries and keys of every head (Yang et al. 2025, arXiv 2505.09388)."""

    model_type = "qwen3"
    reads = READS | {"use_sliding_window", "sliding_window"}
    block = BLOCK | {name: theirs for name, theirs in Gemma2Door.block.items() if name.startswith("attention.norm.")}

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a Qwen3Config."""
        bias = values.get("attention_bias", False)
        refuse_others(values, {"use_sliding_window": (False, None), "attention_bias": (False,)})
        plain = super().configure({"head_dim": 128} | dict(values) | {"mlp_bias": bias})
        return dataclasses.replace(plain, mechanism=MECHANISM, options={"norm_eps": plain.norm_eps})

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """A Qwen3Config that transformers 5 reads."""
        require_fields(config, FIXED | {"bias": False}, self.model_type)
        plain = {"norm_eps": config.norm_eps, "cap": None, "window": None, "scale": None}
        for attention in layer_attentions(config):
            if gemma_options(attention, self.model_type) != plain:
                raise Incompatible(f"windows, caps and scales cannot be said in a {self.model_type} config.json")
        return sizes_of(config, self.model_type, "Qwen3ForCausalLM") | {
            "hidden_act": "silu",
            "rope_parameters": rope_of_all(config),
            "attention_bias": False,
            "use_sliding_window": False,
        }
