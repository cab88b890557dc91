"""Tiny configs of decoder families of transformers, by `model_type`; the vocabulary has 61 tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NARROW: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
FEW_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
GEMMA = {"head_dim": 12, "num_key_value_heads": 1, "sliding_window": 5}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.3, 1.7, 2.5], "long_factor": [2.0] * 4}
LLAMA4 = NARROW | {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "intermediate_size": 16,
    "intermediate_size_mlp": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 5,
}
SMOLLM_WINDOWS = {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5}
ELSEWHERE = {"layer_types": ["full_attention", *["chunked_attention"] * 3]}
GPT: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}

FAMILIES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "llama": {"": NARROW},
    "mistral": {"": NARROW | {"sliding_window": 5}, "no windows": NARROW | {"sliding_window": None}},
    "mixtral": {
        "": NARROW | {"num_local_experts": 4, "head_dim": 8},
        "windows": NARROW | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 5},
    },
    "gpt2": {"": GPT},
    "qwen3": {"": NARROW | {"head_dim": 12}},
    "gemma2": {
        "": NARROW | GEMMA | {"num_hidden_layers": 3},
        "no caps": NARROW | GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    },
    "gemma3_text": {"": NARROW | GEMMA | {"num_hidden_layers": 6}},
    "deepseek_v2": {"": NARROW | LATENT},
    "deepseek_v3": {"": NARROW | LATENT | {"n_group": 4, "topk_group": 2, "num_hidden_layers": 3}},
    "qwen2": {
        "": NARROW,
        "half with windows": NARROW | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    },
    "phi3": {
        "": NARROW | {"partial_rotary_factor": 0.5, "sliding_window": 5},
        "long": NARROW | {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32},
    },
    "qwen3_moe": {
        "": NARROW | {"head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "first dense": NARROW
        | {
            "head_dim": 12,
            "num_experts": 5,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        }
        | {"num_experts_per_tok": 2},
    },
    "smollm3": {
        "": NARROW | {"num_hidden_layers": 4},
        "windows": NARROW | SMOLLM_WINDOWS,
        "windows with positions": NARROW | SMOLLM_WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]},
    },
    "granite": {
        "": NARROW
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}
    },
    "gpt_neox": {"": NARROW | {"rotary_pct": 0.5}, "one after the other": NARROW | {"use_parallel_residual": False}},
    "falcon": {
        "": NARROW,
        "groups": NARROW | NEW_FALCON,
        "groups, one norm": NARROW | NEW_FALCON | {"num_ln_in_parallel_attn": 1},
        "one after the other": NARROW | {"parallel_attn": False, "multi_query": False, "bias": True},
    },
    "starcoder2": {"": NARROW | {"sliding_window": 5}, "no biases": NARROW | {"use_bias": False}},
    "opt": {"": NARROW | {"ffn_dim": 48}, "post-norm": NARROW | {"ffn_dim": 48, "do_layer_norm_before": False}},
    "bloom": {
        "": {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4} | NO_TOKENS,
        "six heads": {"vocab_size": 61, "hidden_size": 36, "n_layer": 2, "n_head": 6} | NO_TOKENS,
    },
    "cohere": {"": NARROW | {"logit_scale": 0.25, "attention_bias": True}},
    "cohere2": {"": NARROW | {"num_hidden_layers": 4, "sliding_window": 5}},
    "glm": {"": NARROW | {"head_dim": 8}},
    "glm4": {"": NARROW | {"head_dim": 8}},
    "olmo3": {
        "": NARROW | {"num_hidden_layers": 4, "sliding_window": 5},
        "stretched": NARROW
        | {"num_hidden_layers": 4, "sliding_window": 5}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    },
    "ministral": {
        "": NARROW | {"head_dim": 8, "sliding_window": 5},
        "mixed": NARROW | {"head_dim": 8, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    },
    "gptj": {"": GPT | {"rotary_dim": 4}, "whole heads": GPT | {"rotary_dim": 8}},
    "mpt": {"": {"vocab_size": 61, "d_model": 36, "n_layers": 2, "n_heads": 6, "max_seq_len": 64}},
    "gpt_bigcode": {"": GPT | NO_TOKENS, "own keys": GPT | NO_TOKENS | {"multi_query": False}},
    "seed_oss": {"": NARROW | {"head_dim": 12, "attention_out_bias": True}},
    "ernie4_5": {"": NARROW | {"head_dim": 12}, "biases": NARROW | {"head_dim": 8, "use_bias": True}},
    "helium": {"": NARROW | {"head_dim": 8}},
    "stablelm": {"": NARROW, "parallel": NARROW | {"use_parallel_residual": True, "use_qkv_bias": True}},
    "phi": {"": NARROW},
    "qwen2_moe": {
        "": NARROW | FEW_EXPERTS | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32},
        "every other layer sparse": NARROW
        | FEW_EXPERTS
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_hidden_layers": 4}
        | {"decoder_sparse_step": 2, "norm_topk_prob": True},
    },
    "olmoe": {"": NARROW | FEW_EXPERTS | {"intermediate_size": 16}},
    "exaone4": {
        "": NARROW | {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 5},
        "no windows": NARROW | {"head_dim": 8, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    },
    "gpt_oss": {
        "": NARROW | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
        "plain positions": NARROW
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "llama4_text": {
        "": LLAMA4 | {"floor_scale": 3, "attn_scale": 0.7},
        "every other layer sparse": LLAMA4 | {"interleave_moe_layer_step": 2, "attn_temperature_tuning": False},
        "chunks elsewhere": LLAMA4 | ELSEWHERE | {"floor_scale": 3, "attn_scale": 0.7},
        "no norms, chunks elsewhere": LLAMA4 | ELSEWHERE | {"attn_temperature_tuning": False, "use_qk_norm": False},
    },
    "mamba2": {
        "": {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8}
        | {"state_size": 6, "n_groups": 2, "chunk_size": 8}
        | NO_TOKENS
    },
}
"""The configs of each family by a label; the label of the usual one is empty."""
