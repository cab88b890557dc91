"""Llama 4, the text model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import FULL, listed_layer_types, require_allowed, required_count
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, FamilyAdapter
from attn_models.adapters.rope import Rope, one_rope_of

TURNS = ("default", "linear", "llama3", None)
CHUNKED = "chunked_attention"
SHARED = {f"feed_forward.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
DENSE = {f"feed_forward.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")}
TUNING = {"temperature": "attn_scale", "temperature_floor": "floor_scale"}


class Llama4Adapter(FamilyAdapter):
    """Chunked attention with rotary positions and normed queries and keys, full attention without positions in every
    fourth layer, and one routed expert per token beside a shared one (Meta 2025)."""

    model_type = "llama4_text"
    architecture = "Llama4ForCausalLM"
    fields = GROUPED | {
        "norm_eps": "rms_norm_eps",
        "head_dim": "head_dim",
        "bias": "attention_bias",
        "intermediate_size": "intermediate_size_mlp",
        "num_experts_per_tok": "num_experts_per_tok",
    }
    fixed = {"norm": "rms", "positions": "rotary", "rope_interleave": True, "feed_forward_bias": False}
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"} | {
        "intermediate_size": 8192,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "use_qk_norm": True,
    }
    allowed = {"router_jitter_noise": (0.0, None)}
    rope_base = 500000.0
    option_keys = TUNING | {"chunk": "attention_chunk_size", "num_experts": "num_local_experts"}
    reads = frozenset({"layer_types", "no_rope_layers", "no_rope_layer_interval", "moe_layers"}) | {
        "interleave_moe_layer_step"
    }
    names = LLAMA_NAMES | DENSE | SHARED | {"feed_forward.router.score": "feed_forward.router"}
    stacked = {"feed_forward.experts.gate_up_proj": ("gate", "up"), "feed_forward.experts.down_proj": ("down",)}
    ones = re.compile(r"attention\.norm\.(query|key)_gain$")

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions; raises `InvalidValue` for YaRN, whose factor on queries and keys would be lost in the
        norms that transformers applies after the rotation."""
        given = one_rope_of(values)
        require_allowed({"rope_type": given.get("rope_type", given.get("type"))}, {"rope_type": TURNS})
        return super().rope(values)

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The chunk, if the layer has one; with rotary positions query/key norms, without them temperature tuning."""
        layers = required_count(values, "num_hidden_layers")
        rotary_layers = values.get("no_rope_layers") or self._default_rotary_layers(values, layers)
        if (
            not isinstance(rotary_layers, list)
            or len(rotary_layers) < layers
            or any(each not in (0, 1) for each in rotary_layers)
        ):
            raise InvalidValue.of("no_rope_layers", rotary_layers, f"0 or 1 for each of {layers} layers")
        usual = [CHUNKED if each else FULL for each in rotary_layers[:layers]]
        kinds = listed_layer_types(values, layers, (FULL, CHUNKED)) or usual
        chunk = required_count(values, "attention_chunk_size") if kinds[layer] == CHUNKED else None
        options: dict[str, Any] = {"norm_eps": None, "chunk": chunk}
        if rotary_layers[layer]:
            return options | ({"norm_eps": values["rms_norm_eps"]} if values["use_qk_norm"] else {})
        tuned = bool(values["attn_temperature_tuning"] and values["attn_scale"])
        return options | {"rotary": None} | ({ours: values[key] for ours, key in TUNING.items()} if tuned else {})

    def _default_rotary_layers(self, values: Mapping[str, Any], layers: int) -> list[int]:
        period = required_count(values, "no_rope_layer_interval", 4)
        return [int((layer + 1) % period != 0) for layer in range(layers)]

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the experts, which the last layer of each period has."""
        layers = required_count(values, "num_hidden_layers")
        step = required_count(values, "interleave_moe_layer_step", 1)
        sparse = list(range(step - 1, layers, step))
        given = values.get("moe_layers")
        if given is not None and given != sparse:
            first = given[0] if isinstance(given, list) and given else None
            step = first + 1 if type(first) is int and first >= 0 else layers + 1
            stepped = list(range(step - 1, layers, step))
            require_allowed({"moe_layers": given}, {"moe_layers": (sparse, stepped or None)})
        return {
            "num_experts": required_count(values, "num_local_experts"),
            "n_shared_experts": 1,
            "moe_intermediate_size": required_count(values, "intermediate_size"),
            "routing": "llama4",
            "decoder_sparse_step": step,
        }

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of the experts, and of the attention of each layer."""
        options = [config.choice(layer).options for layer in range(config.num_layers)]
        chunks = [each["chunk"] for each in options if each.get("chunk")]
        tuned = next((each for each in options if each.get("temperature")), None)
        return {
            "num_local_experts": config.num_experts,
            "intermediate_size": config.moe_intermediate_size or config.inner_width,
            "moe_layers": [layer for layer in range(config.num_layers) if config.is_sparse(layer)],
            "interleave_moe_layer_step": config.decoder_sparse_step,
            "layer_types": [CHUNKED if each.get("chunk") else FULL for each in options],
            "attention_chunk_size": chunks[0] if chunks else 8192,
            "no_rope_layers": [int("rotary" not in each) for each in options],
            "use_qk_norm": any(each.get("norm_eps") for each in options),
            "attn_temperature_tuning": tuned is not None,
            **({key: tuned[ours] for ours, key in TUNING.items()} if tuned else {}),
        }
