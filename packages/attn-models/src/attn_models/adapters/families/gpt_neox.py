"""GPT-NeoX and Pythia."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.family import GELUS, QKV, SIZES, FamilyAdapter


class GptNeoxAdapter(FamilyAdapter):
    """Parallel attention and feed-forward, rotary on a quarter of each head (Black et al. 2022, arXiv 2204.06745)."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    fields = SIZES | {"norm_eps": "layer_norm_eps", "bias": "attention_bias", "dropout": "hidden_dropout"}
    fixed = {"norm": "layer", "positions": "rotary", "norm_bias": True, "feed_forward_bias": True}
    defaults = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True, "use_parallel_residual": True}
    activations = GELUS
    rotary_fraction = 0.25
    rope_keys_outside = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    reads = frozenset({"head_dim"})
    allowed = {"is_decoder": (True, False, None)}
    layers = "gpt_neox.layers"
    derived_names = re.compile(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
    names = {
        "embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "unembedding": "embed_out",
        "attention_norm": "input_layernorm",
        "attention.output": "attention.dense",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    fused = {"attention.query_key_value": QKV}

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:
        """One block per head: its query, key and value."""
        return {"attention.query_key_value": config.num_heads}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Whether the sublayers are parallel; raises `InvalidValue` for a `head_dim` other than hidden size / heads."""
        size = required_count(values, "hidden_size") // required_count(values, "num_attention_heads")
        require_allowed(values, {"head_dim": (size, None)})
        return {"norm_place": "parallel" if values["use_parallel_residual"] else "pre"}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """Whether the sublayers are parallel."""
        return {"use_parallel_residual": config.norm_place == "parallel"}
