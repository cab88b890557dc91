"""Qwen 2, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import FULL, SLIDING, required_count
from attn_models.adapters.family import LLAMA_FIELDS, LLAMA_NAMES, QK_NORM, FamilyAdapter, kind_keys, listed_kinds


class Qwen2Adapter(FamilyAdapter):
    """Llama with biases on queries, keys and values (Yang et al. 2024, arXiv 2407.10671)."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    fields = LLAMA_FIELDS
    fixed = {"norm": "rms", "positions": "rotary", "attention_bias": True, "attention_output_bias": False}
    defaults = {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    reads = frozenset({"use_sliding_window", "layer_types"})

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """A window in the layers from `max_window_layers` on, or in those that `layer_types` names."""
        windows = values.get("use_sliding_window") and values.get("sliding_window") is not None
        first = required_count(values, "max_window_layers", least=0) if windows else 0
        layers = range(required_count(values, "num_hidden_layers"))
        kinds = listed_kinds(values, [SLIDING if windows and each >= first else FULL for each in layers])
        if kinds[layer] == FULL:
            return {}
        return {"window": required_count(values if windows else {}, "sliding_window")}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The kind of each layer, and the window."""
        keys = kind_keys(config)
        return keys | {"use_sliding_window": keys["sliding_window"] is not None, "max_window_layers": 0}


class Qwen3Adapter(Qwen2Adapter):
    """Qwen 2 with RMSNorm on queries and keys per head, and optional biases (Yang et al. 2025, arXiv 2505.09388)."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fields = Qwen2Adapter.fields | {"bias": "attention_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward_bias": False}
    defaults = Qwen2Adapter.defaults | {"head_dim": 128}
    names = LLAMA_NAMES | QK_NORM

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """Norms of queries and keys, and the window of the layer if it has one."""
        return {"norm_eps": values["rms_norm_eps"]} | super().layer_options(values, layer)
