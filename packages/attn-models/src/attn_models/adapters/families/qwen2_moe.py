"""Qwen 1.5 and 2 with experts, and OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.families.qwen3_moe import ROUTING, Qwen3MoeAdapter
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, FamilyAdapter

EXPERTS = Qwen3MoeAdapter.experts | {"feed_forward.router.score": "mlp.gate"}
SHARED = {f"feed_forward.shared.{one}": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")}


class Qwen2MoeAdapter(FamilyAdapter):
    """Routed experts beside shared ones with a gate (Yang et al. 2024, arXiv 2407.10671, section 2.2.2)."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    fields = GROUPED | {"norm_eps": "rms_norm_eps", "attention_bias": "qkv_bias"}
    fixed = {
        "norm": "rms",
        "positions": "rotary",
        "attention_output_bias": False,
        "feed_forward_bias": False,
        "shared_expert_gate": True,
    }
    defaults = {
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
    }
    allowed = {"use_sliding_window": (False, None)}
    reads = frozenset({"sliding_window", "mlp_only_layers", "norm_topk_prob"})
    names = LLAMA_NAMES | EXPERTS | SHARED | {"feed_forward.shared_expert_gate": "mlp.shared_expert_gate"}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the experts; `mlp_only_layers` must be the first layers, and not all of them."""
        dense, layers = values.get("mlp_only_layers") or [], required_count(values, "num_hidden_layers")
        if not isinstance(dense, list) or dense != list(range(len(dense))) or len(dense) >= layers:
            raise InvalidValue.of(
                "mlp_only_layers", dense, "the numbers of the first layers, without gaps, and not all layers"
            )
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
        counts = {name: required_count(values, name) for name in names}
        width, shared = counts["moe_intermediate_size"], required_count(values, "shared_expert_intermediate_size")
        if shared % width:
            raise InvalidValue.of("shared_expert_intermediate_size", shared, f"a multiple of the experts' {width}")
        routing = ROUTING[bool(values.get("norm_topk_prob"))]
        return counts | {
            "n_shared_experts": shared // width,
            "routing": routing,
            "first_k_dense_replace": len(dense),
        }

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of the experts."""
        names = ("num_experts", "num_experts_per_tok", "decoder_sparse_step")
        return {name: getattr(config, name) for name in names} | {
            "moe_intermediate_size": config.expert_width,
            "shared_expert_intermediate_size": (config.n_shared_experts or 0) * config.expert_width,
            "norm_topk_prob": config.routing == ROUTING[True],
            "mlp_only_layers": list(range(config.first_k_dense_replace)),
        }


class OlmoeAdapter(FamilyAdapter):
    """Experts in every layer, norms over the queries and keys of all heads (Muennighoff et al. 2024, arXiv 2409.02060).

    `intermediate_size` is that of an expert.
    """

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    fields = GROUPED | {"norm_eps": "rms_norm_eps", "bias": "attention_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward_bias": False}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "num_experts": 64, "num_experts_per_tok": 8}
    allowed = {"clip_qkv": (None,)}
    aliases = {"num_local_experts": "num_experts"}
    reads = frozenset({"norm_topk_prob"})
    names = LLAMA_NAMES | QK_NORM | EXPERTS

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """Norms of queries and keys."""
        return {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the experts."""
        counts = {name: required_count(values, name) for name in ("num_experts", "num_experts_per_tok")}
        return counts | {"routing": ROUTING[bool(values.get("norm_topk_prob"))]}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of the experts; raises `InvalidValue` for experts of another width than `intermediate_size`."""
        require_allowed(
            {"moe_intermediate_size": config.expert_width}, {"moe_intermediate_size": (config.inner_width,)}
        )
        return {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "norm_topk_prob": config.routing == ROUTING[True],
        }
