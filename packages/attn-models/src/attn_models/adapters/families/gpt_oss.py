"""gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.family import LLAMA_FIELDS, LLAMA_NAMES, FamilyAdapter, periodic_kinds
from attn_models.adapters.rope import Rope

YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
EXPERTS = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}


class GptOssAdapter(FamilyAdapter):
    """Attention sinks, alternating windows, experts with clamped gates and biases (OpenAI 2025, arXiv 2508.10925)."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    fields = LLAMA_FIELDS | EXPERTS | {"bias": "attention_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward": "swiglu_clamped", "routing": "mixtral"} | {
        "feed_forward_bias": True,
        "router_bias": True,
    }
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    }
    activations = {}
    aliases = {"num_experts": "num_local_experts"}
    allowed = {"hidden_act": ("silu",), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}
    rope_base = 150000.0
    mechanism = "attn-variants/sink"
    reads = frozenset({"layer_types"})
    names = LLAMA_NAMES | {"attention.distribution.logit": "self_attn.sinks", "feed_forward.router.score": "mlp.router"}
    stacked = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """A window in every other layer."""
        return self.kind_options(values, periodic_kinds(values, 2)[layer])

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions, scaled by YaRN where the config.json does not describe any."""
        unsaid = values.get("rope_parameters") is None and not values.get("rope_scaling")
        usual = {"rope_parameters": YARN | {"original_max_position_embeddings": 4096}} if unsaid else {}
        return super().rope({**values, **usual})

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:
        """Rows of the gate and up projections alternate: one block per pair of rows."""
        return {"mlp.experts.gate_up_proj": config.inner_width}
