"""Ministral 8B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.base import required_count
from attn_models.adapters.family import FULL, LLAMA_FIELDS, SLIDING, FamilyAdapter, listed_kinds


class MinistralAdapter(FamilyAdapter):
    """Mistral with a window in only some of the layers (Mistral AI 2024)."""

    model_type = "ministral"
    architecture = "MinistralForCausalLM"
    fields = LLAMA_FIELDS
    fixed = {"norm": "rms", "positions": "rotary"}
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 4096}
    reads = frozenset({"layer_types"})

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The window, in every layer unless `layer_types` says otherwise."""
        usual = FULL if values.get("sliding_window") is None else SLIDING
        kind = listed_kinds(values, [usual] * required_count(values, "num_hidden_layers"))[layer]
        return {} if kind == FULL else {"window": required_count(values, "sliding_window")}
