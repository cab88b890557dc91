"""Falcon: 7B and 11B, and models of the newer architecture with groups of heads, such as 40B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.family import GELUS, QKV, SIZES, FamilyAdapter

KEYS = ("new_decoder_architecture", "multi_query", "parallel_attn", "num_ln_in_parallel_attn")


class FalconAdapter(FamilyAdapter):
    """Parallel attention and feed-forward, few key/value heads (Almazrouei et al. 2023, arXiv 2311.16867)."""

    model_type = "falcon"
    architecture = "FalconForCausalLM"
    fields = (
        SIZES
        | {"intermediate_size": "ffn_hidden_size", "norm_eps": "layer_norm_epsilon", "bias": "bias"}
        | {"dropout": "hidden_dropout"}
    )
    fixed = {"norm": "layer", "positions": "rotary", "norm_bias": True}
    defaults = {"layer_norm_epsilon": 1e-5, "activation": "gelu", "tie_word_embeddings": True, "multi_query": True} | {
        "parallel_attn": True,
        "max_position_embeddings": 2048,
    }
    activation_key, activations = "activation", GELUS
    allowed = {"alibi": (False, None)}
    reads = frozenset({*KEYS, "num_kv_heads"})
    option_keys = {"num_kv_heads": "num_kv_heads"}
    layers = "transformer.h"
    names = {
        "embedding": "transformer.word_embeddings",
        "norm": "transformer.ln_f",
        "unembedding": "lm_head",
        "attention.output": "self_attention.dense",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    fused = {"self_attention.query_key_value": QKV}

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:
        """One block per key/value head: the queries of its group, then the key and the value."""
        return {"self_attention.query_key_value": config.num_kv_heads or config.num_heads}

    def layout(self, config: DecoderConfig) -> FamilyAdapter:
        """See `FamilyAdapter`; norms have other names where each of the parallel sublayers has its own."""
        two_norms = config.norm_place == "parallel"
        first, second = ("ln_attn", "ln_mlp") if two_norms else ("input_layernorm", "post_attention_layernorm")
        bound = super().layout(config)
        bound.names = self.names | {"attention_norm": first, "feed_forward_norm": second}  # type: ignore[misc]
        return bound

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The number of key/value heads and the place of the norms, which depend on the version of the architecture."""
        new, multi_query, parallel, norms = (values.get(key) for key in KEYS)
        heads = required_count(values, "num_attention_heads")
        shared = heads if values.get("num_kv_heads") is None else required_count(values, "num_kv_heads")
        if not new:
            allowed = {"num_ln_in_parallel_attn": (None, 1), "num_kv_heads": (None, heads, 1 if multi_query else heads)}
            require_allowed(values, allowed)
            return {"num_kv_heads": 1 if multi_query else heads, "norm_place": "parallel_shared" if parallel else "pre"}
        require_allowed(values, {"parallel_attn": (True,), "num_ln_in_parallel_attn": (None, 1, 2)})
        return {"num_kv_heads": shared, "norm_place": "parallel_shared" if norms == 1 else "parallel"}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of the newer architecture where there are groups of heads or two norms, else those of the older."""
        shared, parallel = config.num_kv_heads or config.num_heads, config.norm_place != "pre"
        new = config.norm_place == "parallel" or shared not in (1, config.num_heads)
        norms = {"num_ln_in_parallel_attn": 2 if config.norm_place == "parallel" else 1} if new else {}
        keys = {"new_decoder_architecture": new, "parallel_attn": parallel, "multi_query": not new and shared == 1}
        return keys | norms | ({"num_kv_heads": shared} if new else {})
