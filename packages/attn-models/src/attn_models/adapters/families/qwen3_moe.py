"""Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import required_count
from attn_models.adapters.family import LLAMA_FIELDS, LLAMA_NAMES, QK_NORM, FamilyAdapter

ROUTING = {True: "mixtral", False: "switch"}


class Qwen3MoeAdapter(FamilyAdapter):
    """Qwen 3 with a mixture of experts in every layer (Yang et al. 2025, arXiv 2505.09388)."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    fields = LLAMA_FIELDS | {"bias": "attention_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward_bias": False}
    defaults = {
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    allowed = {"use_sliding_window": (False, None), "decoder_sparse_step": (1,)}
    aliases = {"num_local_experts": "num_experts"}
    reads = frozenset({"sliding_window", "mlp_only_layers", "norm_topk_prob", "num_experts"})
    experts = {f"feed_forward.experts.{{}}.{one}": f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")}
    names = LLAMA_NAMES | QK_NORM | experts | {"feed_forward.router.score": "mlp.gate"}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """Norms of queries and keys."""
        return {"norm_eps": values["rms_norm_eps"]}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the experts; `mlp_only_layers` must be the first layers, and not all of them."""
        dense, layers = values.get("mlp_only_layers") or [], required_count(values, "num_hidden_layers")
        if not isinstance(dense, list) or dense != list(range(len(dense))) or len(dense) >= layers:
            raise InvalidValue.of(
                "mlp_only_layers", dense, "the numbers of the first layers, without gaps, and not all layers"
            )
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        counts = {name: required_count(values, name) for name in names}
        return counts | {"routing": ROUTING[bool(values.get("norm_topk_prob"))], "first_k_dense_replace": len(dense)}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of the experts."""
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        counts = {name: getattr(config, name) for name in names} | {"norm_topk_prob": config.routing == ROUTING[True]}
        return counts | {"mlp_only_layers": list(range(config.first_k_dense_replace)), "decoder_sparse_step": 1}
