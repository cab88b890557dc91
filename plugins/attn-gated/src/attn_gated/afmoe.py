"""AFMoE, the family of Trinity (Arcee)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.base import FULL, SLIDING, required_count
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, FamilyAdapter, kind_keys, listed_kinds

MATRICES = ("gate", "up", "down")
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
    "routed_scaling_factor": "route_scale",
}


class AfmoeAdapter(FamilyAdapter):
    """Elementwise gates and normed queries and keys, windows with rotary positions in three of four layers, full
    attention without positions in the others, norms around sublayers, and experts chosen by sigmoids with biases."""

    model_type = "afmoe"
    architecture = "AfmoeForCausalLM"
    fields = GROUPED | EXPERTS | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"}
    fixed = {"norm": "rms", "norm_place": "both", "positions": "rotary", "routing": "deepseek_v3"}
    defaults = {"head_dim": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 1024} | {
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 1.0,
    }
    allowed = {"attention_bias": (False, None)}
    reads = frozenset({"layer_types", "global_attn_every_n_layers", "mup_enabled"})
    mechanism = "attn-gated/gated"
    names = (
        LLAMA_NAMES
        | QK_NORM
        | {f"feed_forward.experts.{{}}.{one}": f"mlp.experts.{{}}.{one}_proj" for one in MATRICES}
        | {f"feed_forward.shared.{one}": f"mlp.shared_experts.{one}_proj" for one in MATRICES}
        | {
            "attention.inner.gate": "self_attn.gate_proj",
            "attended_norm": "post_attention_layernorm",
            "feed_forward_norm": "pre_mlp_layernorm",
            "fed_norm": "post_mlp_layernorm",
            "feed_forward.router.score": "mlp.router.gate",
            "feed_forward.router.correction": "mlp.expert_bias",
        }
    )

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norms, and a window or no rotary positions."""
        period = required_count(values, "global_attn_every_n_layers", 4)
        layers = range(required_count(values, "num_hidden_layers"))
        full = listed_kinds(values, [SLIDING if (each + 1) % period else FULL for each in layers])[layer] == FULL
        own = {"rotary": None} if full else self.kind_options(values, SLIDING)
        return {"norm_eps": values["rms_norm_eps"], **own}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The factor of embeddings."""
        factor: float = required_count(values, "hidden_size") ** 0.5 if values.get("mup_enabled") else 1.0
        return {"embedding_multiplier": factor}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kinds of layers, and whether embeddings are scaled."""
        return kind_keys(config) | {"mup_enabled": config.embedding_multiplier != 1}
