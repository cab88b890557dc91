"""GGUF files of Gemma 4 and MiniMax-M2."""

from __future__ import annotations

from typing import Any

from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.adapters.base import FULL, SLIDING
from attn_models.weights.gguf_architectures import SCALED, count_or, layer_count, vocabulary_size
from attn_models.weights.gguf_families import EXPERTS, SIGMOID, TURNED, WINDOW, GgufFamily, Keys, experts, number
from attn_models.weights.gguf_reader import GgufHeader
from attn_models.weights.gguf_rope import FACTORS, factors_of

NEVER = 1e30
"""The divisor of the frequencies of pairs that are not rotated."""


def _gemma4(header: GgufHeader) -> Keys:
    """The config.json. The heads of full layers, of which files have no count of their own, follow from the tensors."""
    layers, shared = layer_count(header), header.metadata.get("gemma4.attention.shared_kv_layers", 0)
    full = header.metadata.get("gemma4.attention.sliding_window_pattern")
    if not isinstance(full, tuple) or len(full) != layers or full[-1]:
        key = "gemma4.attention.sliding_window_pattern"
        rule = f"{key} is {full!r}; needed: a flag for each of {layers} layers, of which the last has no window"
        raise Incompatible(f"{header.path}: {rule}", path=header.path, what=key)
    kinds = [SLIDING if windowed else FULL for windowed in full]
    wide, narrow = header.count("gemma4.attention.key_length"), header.count("gemma4.attention.key_length_swa")
    for key, size in (("value_length", wide), ("value_length_swa", narrow)):
        _require(header, f"attention.{key}", size)
    for key, size in (("dimension_count", wide), ("dimension_count_swa", narrow)):
        _require(header, f"rope.{key}", size)
    first = kinds.index(FULL)
    widths = _each(header, "gemma4.feed_forward_length", layers)
    return {
        "model_type": "gemma4_text",
        "vocab_size": vocabulary_size(header),
        "hidden_size": header.count("gemma4.embedding_length"),
        "num_hidden_layers": layers,
        "max_position_embeddings": header.count("gemma4.context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "num_attention_heads": header.count("gemma4.attention.head_count"),
        "num_key_value_heads": _heads(header, kinds.index(SLIDING), narrow) if SLIDING in kinds else 1,
        "head_dim": narrow,
        "num_global_key_value_heads": _heads(header, first, wide),
        "global_head_dim": wide,
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in header.tensors,
        "layer_types": kinds,
        "sliding_window": header.count("gemma4.attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "rms_norm_eps": number(header, "gemma4.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {FULL: _turned(header), SLIDING: _base(header, "rope.freq_base_swa")},
        **_of_each_token(header),
        **_of_experts(header),
    }


def _require(header: GgufHeader, key: str, needed: int) -> None:
    if count_or(header, f"gemma4.{key}", needed) != needed:
        rule = f"gemma4.{key} is {header.metadata[f'gemma4.{key}']}; allowed: {needed}"
        raise Incompatible(f"{header.path}: {rule}", path=header.path, what=key)


def _each(header: GgufHeader, key: str, layers: int) -> tuple[int, ...]:
    """The number of each layer, of which a file may have one for all."""
    given = header.metadata.get(key)
    found = header.integers(key) if isinstance(given, tuple) else (header.count(key),) * layers
    if len(found) != layers:
        raise CheckpointInvalid.of(header.path, f"{key} has {len(found)} numbers for {layers} layers")
    return found


def _heads(header: GgufHeader, layer: int, size: int) -> int:
    """The number of key/value heads of a layer."""
    found = header.tensors.get(name := f"blk.{layer}.attn_k.weight")
    if found is None or len(found.shape) != 2 or found.shape[0] % size:
        raise CheckpointInvalid.of(header.path, f"tensor {name!r} is missing, or has no heads of {size} rows")
    return found.shape[0] // size


def _base(header: GgufHeader, key: str) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": number(header, f"gemma4.{key}")}


def _turned(header: GgufHeader) -> dict[str, Any]:
    """The rotary positions of full layers, whose last pairs have frequencies divided by a number without end."""
    divisors = factors_of(header) if FACTORS in header.tensors else (1.0,)
    turned = divisors.count(1.0)
    if any(divisor < NEVER * 0.999 for divisor in divisors[turned:]) or not turned:
        rule = f"the factors of {FACTORS!r} are not 1 for the first pairs and {NEVER:g} for the others"
        raise Incompatible(f"{header.path}: {rule}", path=header.path, what=FACTORS)
    fraction = turned / len(divisors)
    return _base(header, "rope.freq_base") | {"rope_type": "proportional", "partial_rotary_factor": fraction}


def _of_each_token(header: GgufHeader) -> Keys:
    """The embeddings of each layer, and the cap of logits."""
    found = header.tensors.get("per_layer_token_embd.weight")
    cap = "gemma4.final_logit_softcapping"
    return {
        "hidden_size_per_layer_input": header.metadata.get("gemma4.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": vocabulary_size(header) if found is None else found.shape[0],
        "final_logit_softcapping": number(header, cap) if cap in header.metadata else None,
    }


def _of_experts(header: GgufHeader) -> Keys:
    """The experts; raises Incompatible where their scales are those of blocks, too."""
    if not header.metadata.get("gemma4.expert_count", 0):
        return {"enable_moe_block": False}
    for name, tensor in header.tensors.items():
        if name.endswith("ffn_down_exps.weight") and tensor.type in SCALED:
            rule = f"tensor {name!r} is {tensor.type}, whose scales cannot be told from those of the router"
            raise Incompatible(f"{header.path}: {rule}; convert the folder itself", path=header.path, what=name)
    found = experts(header)
    return {"enable_moe_block": True, "top_k_experts": found.pop("num_experts_per_tok"), **found}


GEMMA4 = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
PER_LAYER = {f"{kind}_length_swa" for kind in ("key", "value")} | {"shared_kv_layers", "sliding_window_pattern"}
GGUF_FAMILIES = (
    GgufFamily(
        "gemma4",
        "gemma4_text",
        described=_gemma4,
        read=WINDOW
        | EXPERTS
        | {f"attention.{key}" for key in PER_LAYER}
        | {"rope.freq_base_swa", "rope.dimension_count_swa", "embedding_length_per_layer_input"}
        | {"final_logit_softcapping"},
        tensors=GEMMA4,
    ),
    GgufFamily(
        "minimax-m2",
        "minimax_m2",
        lambda header: experts(header, "num_local_experts", "intermediate_size"),
        read=TURNED | EXPERTS,
        passed={"expert_gating_func": (SIGMOID,)},
        tensors={"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"},
    ),
)
