"""The layouts of OLMo 2: Llama's, with norms after both sublayers and over all heads of queries and keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attn_core import Causal
from attn_core.norms import QkNormAllHeads
from attn_models.adapters import LlamaAdapter, common_hf_config, hf_rope_parameters, require_allowed, softmax_heads
from attn_models.decoder.config import DecoderConfig
from attn_models.weights import GgufArchitecture, GgufHeader, Placement, llama_like_config

NORMS = {
    "attended_norm": "post_attention_layernorm",
    "fed_norm": "post_feedforward_layernorm",
    "attention.norm.query_gain": "self_attn.q_norm.weight",
    "attention.norm.key_gain": "self_attn.k_norm.weight",
}


class Olmo2Adapter(LlamaAdapter):
    """x + norm(F(x)) for both sublayers F, queries and keys normalised over all heads (arXiv 2501.00656, section 3)."""

    model_type = "olmo2"
    block = {ours: theirs for ours, theirs in LlamaAdapter.block.items() if "norm" not in ours} | NORMS
    required_fields = LlamaAdapter.required_fields | {"norm_place": "after", "feed_forward_bias": False}

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of an Olmo2Config, whose `attention_bias` is of all four projections of attention alone."""
        require_allowed(values, {"mlp_bias": (False, None)})
        biased = bool(values.get("attention_bias"))
        plain = super().from_hf_config({"rms_norm_eps": 1e-5, **values, "mlp_bias": biased})
        return dataclasses.replace(
            plain,
            mechanism="attn-variants/gemma",
            options={"norm_eps": plain.norm_eps, "norm_over": "all_heads"},
            norm_place="after",
            feed_forward_bias=False,
        )

    def to_hf_config(self, config: DecoderConfig) -> dict[str, Any]:
        """An Olmo2Config that transformers 5 reads."""
        self.require_expressible(config)
        softmax_heads(config, Causal(), self.model_type, QkNormAllHeads(eps=config.norm_eps))
        return common_hf_config(config, self.model_type, "Olmo2ForCausalLM") | {
            "rope_parameters": hf_rope_parameters(config),
            "attention_bias": config.bias,
        }
