"""Decoders that differ from Llama in biases, norms, windows and in which elements of a head form a rotary pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.base import FULL, SLIDING, required_count
from attn_models.adapters.family import (
    LLAMA_FIELDS,
    LLAMA_NAMES,
    NORMS_AFTER,
    QK_NORM,
    FamilyAdapter,
    listed_kinds,
    periodic_kinds,
)


class SeedOssAdapter(FamilyAdapter):
    """Seed-OSS: biases of queries, keys and values, and of the output apart (ByteDance Seed 2025)."""

    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"
    fields = LLAMA_FIELDS | {
        "attention_bias": "attention_bias",
        "attention_output_bias": "attention_out_bias",
        "feed_forward_bias": "mlp_bias",
    }
    fixed = {"norm": "rms", "positions": "rotary"}
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": True,
        "attention_dropout": 0.1,
    }


class Ernie45Adapter(FamilyAdapter):
    """ERNIE 4.5: adjacent elements form rotary pairs (Baidu ERNIE Team 2025, ERNIE 4.5 Technical Report)."""

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    fields = LLAMA_FIELDS | {"bias": "use_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "rope_interleave": True}
    defaults = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    rope_base = 500000.0


class HeliumAdapter(FamilyAdapter):
    """Helium: adjacent elements form rotary pairs, the attention's output has no bias (Kyutai 2025)."""

    model_type = "helium"
    architecture = "HeliumForCausalLM"
    fields = LLAMA_FIELDS | {"attention_bias": "attention_bias", "feed_forward_bias": "mlp_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "rope_interleave": True, "attention_output_bias": False}
    defaults = {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "hidden_act": "silu"}
    rope_base = 100000.0


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
        kinds = listed_kinds(values, [usual] * required_count(values, "num_hidden_layers"))
        return self.kind_options(values, kinds[layer])


class Exaone4Adapter(FamilyAdapter):
    """Norms after sublayers and of queries and keys; where there are windows, the other layers have no positions
    (LG AI Research 2025, arXiv 2507.11407)."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    fields = LLAMA_FIELDS
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary"}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 4096}
    reads = frozenset({"layer_types", "sliding_window_pattern"})
    names = LLAMA_NAMES | QK_NORM | NORMS_AFTER

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm of queries and keys, and a window or no positions."""
        window = values.get("sliding_window")
        period = 1 if window is None else required_count(values, "sliding_window_pattern", 4)
        kind = periodic_kinds(values, period)[layer]
        options = {"norm_eps": values["rms_norm_eps"]} | self.kind_options(values, kind)
        return options if window is None or kind == SLIDING else options | {"rotary": None}
