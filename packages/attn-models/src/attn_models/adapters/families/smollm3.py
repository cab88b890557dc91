"""SmolLM 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import FULL, SLIDING, required_count
from attn_models.adapters.family import LLAMA_FIELDS, FamilyAdapter, kind_keys, listed_kinds


class SmolLm3Adapter(FamilyAdapter):
    """Llama without rotary positions in every fourth layer (Bakouch et al. 2025, SmolLM3; arXiv 2501.18795)."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    fields = LLAMA_FIELDS | {"bias": "attention_bias", "feed_forward_bias": "mlp_bias"}
    fixed = {"norm": "rms", "positions": "rotary"}
    defaults = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True}
    rope_base = 2e6
    reads = frozenset(
        {"use_sliding_window", "sliding_window", "no_rope_layers", "no_rope_layer_interval", "layer_types"}
    )

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """No rotary positions where `no_rope_layers` has a 0, and a window where `layer_types` says so."""
        layers, given = required_count(values, "num_hidden_layers"), values.get("no_rope_layers")
        if given is None:
            period = required_count(values, "no_rope_layer_interval", 4)
            given = [int((each + 1) % period != 0) for each in range(layers)]
        if not isinstance(given, list) or len(given) < layers or any(one not in (0, 1) for one in given):
            raise InvalidValue.of("no_rope_layers", given, f"0 or 1 for each of {layers} layers")
        windows = values.get("use_sliding_window") and values.get("sliding_window") is not None
        kinds = listed_kinds(values, [SLIDING if windows and not rotary else FULL for rotary in given[:layers]])
        window = kinds[layer] == SLIDING and windows
        options = {"window": required_count(values, "sliding_window")} if window else {}
        if kinds[layer] == SLIDING and not windows:
            raise InvalidValue.of(
                "layer_types", values.get("layer_types"), "no 'sliding_attention' without use_sliding_window"
            )
        return options if given[layer] else options | {"rotary": None}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """Which layers have rotary positions, and which have a window."""
        keys = kind_keys(config)
        rotary_layers = [int(config.choice(layer).has_rotary) for layer in range(config.num_layers)]
        return keys | {"use_sliding_window": keys["sliding_window"] is not None, "no_rope_layers": rotary_layers}
