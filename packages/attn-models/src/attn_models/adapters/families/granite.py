"""Granite 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.family import LLAMA_FIELDS, FamilyAdapter
from attn_models.attention import layer_attentions


class GraniteAdapter(FamilyAdapter):
    """Llama with multipliers of embeddings, scores, residuals and logits (Granite Team 2024; arXiv 2408.13359)."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    fields = LLAMA_FIELDS | {
        "bias": "attention_bias",
        "feed_forward_bias": "mlp_bias",
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
    }
    fixed = {"norm": "rms", "positions": "rotary"}
    option_keys = {"scale": "attention_multiplier", "logit_scale": "logits_scaling"}
    defaults = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_multiplier": 1.0, "logits_scaling": 1.0}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The scale of attention scores, which replaces 1/√d."""
        return {"scale": values["attention_multiplier"]}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The factor of the logits, the inverse of `logits_scaling`."""
        divisor = values["logits_scaling"]
        if not isinstance(divisor, (int, float)) or divisor <= 0:
            raise InvalidValue.of("logits_scaling", divisor, "a number above 0")
        return {"logit_scale": 1 / divisor}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The multipliers of scores and logits."""
        first = layer_attentions(config)[0]
        spec = first.mechanism.spec(first.config)
        size = config.head_dim or config.hidden_size // config.num_heads
        scale = getattr(None if spec is None else spec.score, "scale", None)
        return {"attention_multiplier": scale or size**-0.5, "logits_scaling": 1 / config.logit_scale}
