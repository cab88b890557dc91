"""BLOOM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import required_count
from attn_models.adapters.family import QKV, FamilyAdapter

CONTEXT = 2048
"""The length of a training sequence in tokens; ALiBi sets no limit, and not every config.json gives one."""


class BloomAdapter(FamilyAdapter):
    """ALiBi, a norm after the embeddings, LayerNorms and biases everywhere (BigScience 2022, arXiv 2211.05100)."""

    model_type = "bloom"
    architecture = "BloomForCausalLM"
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": "seq_length",
        "hidden_size": "hidden_size",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "norm_eps": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
        "attention_dropout": "attention_dropout",
        "dropout": "hidden_dropout",
    }
    fixed = {"norm": "layer", "positions": "none", "bias": True, "embedding_norm": True, "feed_forward": "gelu_tanh"}
    defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "seq_length": CONTEXT}
    activations = {}
    aliases = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    allowed = {"apply_residual_connection_post_layernorm": (False, None), "slow_but_exact": (False, True, None)}
    mechanism = "attn-variants/alibi"
    layers = "transformer.h"
    names = {
        "embedding": "transformer.word_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "unembedding": "lm_head",
        "attention_norm": "input_layernorm",
        "attention.output": "self_attention.dense",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    fused = {"self_attention.query_key_value": QKV}

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:
        """One block per head: its query, key and value."""
        return {"self_attention.query_key_value": config.num_heads}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The feed-forward is four times as wide as the model."""
        return {"intermediate_size": 4 * required_count(values, "hidden_size")}
