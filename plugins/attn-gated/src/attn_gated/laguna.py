"""Laguna (Poolside)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import FULL, SLIDING, required_count
from attn_models.adapters.family import (
    GROUPED,
    LLAMA_NAMES,
    QK_NORM,
    FamilyAdapter,
    dense_first,
    kind_keys,
    listed_kinds,
    shared_experts,
)
from attn_models.attention import layer_attentions

MATRICES = ("gate", "up", "down")
SHARED = "shared_expert_intermediate_size"
PER = {True: "head", "per-head": "head", "per-element": "element"}
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "moe_routed_scaling_factor",
}


class LagunaAdapter(FamilyAdapter):
    """Softplus gates, normed queries and keys, rotary positions by kind of layer and numbers of heads by layer, and
    experts chosen by sigmoids with biases."""

    model_type = "laguna"
    architecture = "LagunaForCausalLM"
    fields = GROUPED | EXPERTS | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"}
    fixed = {"norm": "rms", "positions": "rotary", "routing": "deepseek_v3"}
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu"} | {
        "sliding_window": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "moe_routed_scaling_factor": 1.0,
        SHARED: 512,
        "gating": True,
    }
    allowed = {"attention_bias": (False, None), "moe_apply_router_weight_on_input": (False,)} | {
        "moe_router_logit_softcapping": (0.0,),
        "gating": tuple(PER),
    }
    reads = frozenset({"layer_types", "mlp_layer_types", "num_attention_heads_per_layer"})
    mechanism = "attn-gated/gated"
    ropes = {
        FULL: {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
    names = (
        LLAMA_NAMES
        | QK_NORM
        | {f"feed_forward.experts.{{}}.{one}": f"mlp.experts.{{}}.{one}_proj" for one in MATRICES}
        | {f"feed_forward.shared.{one}": f"mlp.shared_expert.{one}_proj" for one in MATRICES}
        | {
            "attention.inner.gate": "self_attn.g_proj",
            "feed_forward.router.score": "mlp.gate",
            "feed_forward.router.correction": "mlp.experts.e_score_correction_bias",
        }
    )

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The gate, the norms, the number of heads, the window and the rotary positions."""
        layers = required_count(values, "num_hidden_layers")
        kind = listed_kinds(values, [FULL] * layers)[layer]
        options = {"per": PER[values["gating"]], "activation": "softplus", "norm_eps": values["rms_norm_eps"]}
        heads = values.get("num_attention_heads_per_layer")
        if heads is not None:
            if not isinstance(heads, list) or len(heads) != layers:
                raise InvalidValue.of("num_attention_heads_per_layer", heads, f"a number for each of {layers} layers")
            own = required_count({"num_attention_heads_per_layer": heads[layer]}, "num_attention_heads_per_layer")
            options |= {} if own == values["num_attention_heads"] else {"num_heads": own}
        return options | self.kind_options(values, kind)

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The dense layers, which must be the first, and the shared expert, as a number of experts."""
        layers = required_count(values, "num_hidden_layers")
        kinds = values.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
        shared = shared_experts(values, SHARED, "moe_intermediate_size")
        return {"first_k_dense_replace": dense_first(kinds, layers), "n_shared_experts": shared}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The gate, the heads of each layer, the kinds of layers, and the width of the shared expert."""
        layers: list[Any] = [attention.config for attention in layer_attentions(config)]
        dense = config.first_k_dense_replace
        return kind_keys(config) | {
            "gating": "per-head" if getattr(layers[0], "per", None) == "head" else "per-element",
            "num_attention_heads_per_layer": [layer.num_heads for layer in layers],
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config.num_layers - dense),
            SHARED: (config.n_shared_experts or 0) * config.expert_width,
        }
