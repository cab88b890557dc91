"""GGUF files of AFMoE."""

from __future__ import annotations

from attn_models.weights.gguf_architectures import number_or
from attn_models.weights.gguf_families import EXPERTS, SIGMOID, WINDOW, GgufFamily, Keys, experts, layer_kinds
from attn_models.weights.gguf_reader import GgufHeader
from attn_models.weights.gguf_rope import shortest_float32

ROUTED = EXPERTS | {"leading_dense_block_count", "expert_weights_scale", "expert_shared_count"}
PATTERN = "attention.sliding_window_pattern"


def _afmoe(header: GgufHeader) -> Keys:
    """The window, the kinds of layers and the experts; as in llama.cpp embeddings are scaled."""
    return experts(header) | {
        "sliding_window": header.count("afmoe.attention.sliding_window"),
        "layer_types": layer_kinds(header, 4),
        "num_shared_experts": header.count("afmoe.expert_shared_count"),
        "num_dense_layers": header.metadata.get("afmoe.leading_dense_block_count", 0),
        "route_scale": shortest_float32(number_or(header, "afmoe.expert_weights_scale", 1.0)),
        "mup_enabled": True,
    }


GGUF_FAMILIES = (
    GgufFamily(
        "afmoe",
        "afmoe",
        _afmoe,
        read=WINDOW | ROUTED | {PATTERN},
        passed={"expert_gating_func": (SIGMOID,), "expert_weights_norm": (True,)},
        tensors={"mlp.expert_bias": "exp_probs_b.bias"},
    ),
)
