"""Llama checkpoints in GGUF: their configuration and tensor names in Hugging Face terms."""

from __future__ import annotations

from typing import Any

from attn_core.errors import CheckpointInvalid, Incompatible

from attn_models.weights.gguf_header import GgufHeader
from attn_models.weights.placement import (
    Placement,
    count_or,
    layer_count,
    matched,
    number_or,
    shortest_float32,
    vocabulary_size,
)

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_config(header: GgufHeader) -> dict[str, Any]:
    """The config.json of the Llama model in `header`.

    Raises Incompatible for what the layout cannot say (experts, scaled or partial rotary positions)
    and CheckpointInvalid for missing or senseless metadata.
    """
    heads = header.count("llama.attention.head_count")
    width = header.count("llama.embedding_length")
    key_value_heads = count_or(header, "llama.attention.head_count_kv", heads)
    head_size = count_or(header, "llama.attention.key_length", width // heads)
    _refuse_unsupported(header, head_size)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "dtype": "bfloat16",
        "head_dim": head_size,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": header.count("llama.feed_forward_length"),
        "max_position_embeddings": header.count("llama.context_length"),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layer_count(header),
        "num_key_value_heads": key_value_heads,
        "rms_norm_eps": shortest_float32(header.number("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest_float32(number_or(header, "llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": vocabulary_size(header),
    }
    if heads % key_value_heads:
        raise CheckpointInvalid.of(header.path, f"{heads} query heads do not share {key_value_heads} key/value heads")
    return config


def llama_placements(header: GgufHeader, config: dict[str, Any]) -> list[Placement]:
    """A placement for every tensor of the file, and a check that none is missing or of a wrong shape.

    Raises CheckpointInvalid naming the tensor.
    """
    return matched(header, _expected(config), "Llama")


def _expected(config: dict[str, Any]) -> list[Placement]:
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes = {"token_embd.weight": (vocabulary, width), "output_norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (vocabulary, width)
    placements = [Placement(name, OUTER_NAMES[name], shape) for name, shape in shapes.items()]
    for layer in range(config["num_hidden_layers"]):
        placements += _layer(config, layer)
    return placements


def _layer(config: dict[str, Any], layer: int) -> list[Placement]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys, width),
        "attn_v": (keys, width),
        "attn_output": (width, queries),
        "ffn_norm": (width,),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    rotary = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    placements = []
    for part, shape in shapes.items():
        source, target = f"blk.{layer}.{part}", f"model.layers.{layer}.{LAYER_NAMES[part]}"
        heads = rotary.get(part, 0)
        placements.append(Placement(f"{source}.weight", f"{target}.weight", shape, rotary_heads=heads))
        biased = len(shape) == 2 and config["attention_bias" if part.startswith("attn") else "mlp_bias"]
        if biased:
            placements.append(Placement(f"{source}.bias", f"{target}.bias", shape[:1], rotary_heads=heads))
    return placements


def _refuse_unsupported(header: GgufHeader, head_size: int) -> None:
    scaling = header.metadata.get("llama.rope.scaling.type", "none")
    rotated = count_or(header, "llama.rope.dimension_count", head_size)
    value_size = count_or(header, "llama.attention.value_length", head_size)
    problems = {
        "experts (llama.expert_count)": header.metadata.get("llama.expert_count", 0) != 0,
        f"rotary scaling {scaling!r}": scaling != "none" or "rope_freqs.weight" in header.tensors,
        f"rotary positions on {rotated} of {head_size} dimensions": rotated != head_size,
        f"value heads of {value_size} beside key heads of {head_size}": value_size != head_size,
        "an odd head size": head_size % 2 == 1,
    }
    for what, present in problems.items():
        if present:
            raise Incompatible(f"{header.path}: the Llama import does not know {what}", path=header.path, what=what)
