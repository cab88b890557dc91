"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import SLIDING, required_count
from attn_models.adapters.family import GATE_UP, LLAMA_FIELDS, QKV, FamilyAdapter, kind_keys
from attn_models.adapters.rope import Rope, long_rope


class Phi3Adapter(FamilyAdapter):
    """Llama with fused projections and, for long contexts, LongRoPE (Abdin et al. 2024, arXiv 2404.14219).

    With LongRoPE the context is limited to that of the training: beyond it the model would rotate all tokens
    differently.
    """

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    fields = LLAMA_FIELDS
    fixed = {"norm": "rms", "positions": "rotary"}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "original_max_position_embeddings": 4096}
    rotary_fraction = 1.0
    reads = frozenset({"sliding_window"})
    fused = {"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": GATE_UP}

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:
        """None: queries, keys and values are concatenated as whole matrices."""
        return {}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The window, where there is one."""
        return {} if values.get("sliding_window") is None else self.kind_options(values, SLIDING)

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """Plain rotary positions or LongRoPE, the only scaling of the family."""
        return long_rope(values)

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The training context as the longest sequence, where rotary angles depend on the length."""
        if long_rope(values).scaling is None:
            return {}
        context = required_count(values, "original_max_position_embeddings")
        return {"max_seq_len": min(context, required_count(values, "max_position_embeddings"))}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The window; raises `InvalidValue` for scaled rotary positions."""
        if config.rope_scaling is not None:
            raise InvalidValue.of(
                "rope_scaling", config.rope_scaling, "null: only the training context can be described"
            )
        return {"sliding_window": kind_keys(config)["sliding_window"]}
