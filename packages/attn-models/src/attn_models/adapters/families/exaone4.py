"""EXAONE 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import required_count
from attn_models.adapters.family import (
    FULL,
    GROUPED,
    LLAMA_NAMES,
    QK_NORM,
    SLIDING,
    FamilyAdapter,
    kind_keys,
    listed_kinds,
)


class Exaone4Adapter(FamilyAdapter):
    """Norms after sublayers and of queries and keys; where there are windows, the other layers have no positions
    (LG AI Research 2025, arXiv 2507.11407)."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    fields = GROUPED | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"}
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary"}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 4096}
    reads = frozenset({"layer_types", "sliding_window_pattern"})
    names = (
        LLAMA_NAMES | QK_NORM | {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"}
    )

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm of queries and keys, and a window or no positions."""
        layers, window = required_count(values, "num_hidden_layers"), values.get("sliding_window")
        usual = [FULL] * layers
        if window is not None:
            period = required_count(values, "sliding_window_pattern", 4)
            usual = [SLIDING if (each + 1) % period else FULL for each in range(layers)]
        kind = listed_kinds(values, usual)[layer]
        options: dict[str, Any] = {"norm_eps": values["rms_norm_eps"]}
        if kind == SLIDING:
            return options | {"window": required_count(values, "sliding_window")}
        return options if window is None else options | {"rotary": None}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The kind of each layer, and the window."""
        return kind_keys(config)
