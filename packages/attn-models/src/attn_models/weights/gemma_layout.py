"""Gemma 3 checkpoints in GGUF: their configuration and tensor names in Hugging Face terms."""

from __future__ import annotations

from typing import Any

from attn_core.errors import CheckpointInvalid, Incompatible

from attn_models.weights.gguf_header import GgufHeader
from attn_models.weights.llama_layout import LAYER_NAMES, OUTER_NAMES
from attn_models.weights.placement import (
    Placement,
    count_or,
    layer_count,
    matched,
    number_or,
    shortest_float32,
    vocabulary_size,
)

PERIOD = 6
LOCAL_BASE = 10000.0
# What the file does not say: scores are divided by √256 in every size but the largest, which divides by √168.
SCALARS = {62: 168}
NAMES = LAYER_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def gemma_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json of the text model in `header`.

    Raises Incompatible for what is not known here and CheckpointInvalid for missing or senseless metadata.
    """
    heads = header.count("gemma3.attention.head_count")
    size = count_or(header, "gemma3.attention.key_length", 256)
    layers = layer_count(header)
    if count_or(header, "gemma3.attention.value_length", size) != size:
        raise Incompatible(f"{header.path}: the Gemma import does not know value heads that differ from key heads")
    key_value_heads = count_or(header, "gemma3.attention.head_count_kv", heads)
    if heads % key_value_heads:
        raise CheckpointInvalid.of(header.path, f"{heads} query heads do not share {key_value_heads} key/value heads")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "dtype": "bfloat16",
        "final_logit_softcapping": None,
        "head_dim": size,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": header.count("gemma3.embedding_length"),
        "intermediate_size": header.count("gemma3.feed_forward_length"),
        "layer_types": ["sliding_attention" if (i + 1) % PERIOD else "full_attention" for i in range(layers)],
        "max_position_embeddings": header.count("gemma3.context_length"),
        "model_type": "gemma3_text",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_value_heads,
        "query_pre_attn_scalar": SCALARS.get(layers, 256),
        "rms_norm_eps": shortest_float32(header.number("gemma3.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"full_attention": _full_rope(header), "sliding_attention": _local_rope()},
        "sliding_window": header.count("gemma3.attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": vocabulary_size(header),
    }


def gemma_placements(header: GgufHeader, config: dict[str, Any]) -> list[Placement]:
    """A placement for every tensor of the file; raises CheckpointInvalid naming one that does not fit."""
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    placements = [
        Placement("token_embd.weight", OUTER_NAMES["token_embd.weight"], (vocabulary, width)),
        Placement("output_norm.weight", OUTER_NAMES["output_norm.weight"], (width,), above=1.0),
    ]
    if not config["tie_word_embeddings"]:
        placements.append(Placement("output.weight", OUTER_NAMES["output.weight"], (vocabulary, width)))
    for layer in range(config["num_hidden_layers"]):
        for part, shape in _layer_shapes(config).items():
            target = f"model.layers.{layer}.{NAMES[part]}.weight"
            # The file keeps the whole gain of a norm, Hugging Face its distance from one.
            above = 1.0 if len(shape) == 1 else 0.0
            placements.append(Placement(f"blk.{layer}.{part}.weight", target, shape, above=above))
    return matched(header, placements, "Gemma 3")


def _layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    matrices = {
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    gains = dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (width,))
    return matrices | gains | dict.fromkeys(("attn_q_norm", "attn_k_norm"), (size,))


def _full_rope(header: GgufHeader) -> dict[str, Any]:
    base = shortest_float32(number_or(header, "gemma3.rope.freq_base", 1e6))
    kind = header.metadata.get("gemma3.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": header.number("gemma3.rope.scaling.factor"), "rope_theta": base}
    if kind != "none":
        raise Incompatible(f"{header.path}: the Gemma import does not know rotary scaling {kind!r}")
    return {"rope_type": "default", "rope_theta": base}


def _local_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": LOCAL_BASE}
