"""OLMo 2 as data: its config.json, its tensors, and its GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import Incompatible
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, FamilyAdapter
from attn_models.weights import GgufArchitecture, GgufHeader, Placement
from attn_models.weights import gguf_architectures as gguf

AFTER = {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"}


class Olmo2Adapter(FamilyAdapter):
    """Llama with norms after both sublayers, and over all heads of queries and keys (arXiv 2501.00656, section 3)."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fields = GROUPED | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim", "bias": "attention_bias"}
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary", "feed_forward_bias": False}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    names = LLAMA_NAMES | QK_NORM | AFTER

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm of queries and keys."""
        return {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"}


def config(header: GgufHeader) -> dict[str, Any]:
    """The config.json of a GGUF file; raises `Incompatible` for stretched positions."""
    if header.metadata.get("olmo2.rope.scaling.type", "none") != "none":
        raise Incompatible(f"{header.path}: olmo2.rope.scaling.type can only be none here", path=header.path)
    heads, width = header.count("olmo2.attention.head_count"), header.count("olmo2.embedding_length")
    size = gguf.count_or(header, "olmo2.attention.key_length", width // heads)
    if gguf.count_or(header, "olmo2.attention.value_length", size) != size:
        raise Incompatible(f"{header.path}: values can only be as long as keys here", path=header.path)
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_size": width,
        "head_dim": size,
        "intermediate_size": header.count("olmo2.feed_forward_length"),
        "max_position_embeddings": header.count("olmo2.context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": gguf.layer_count(header),
        "num_key_value_heads": gguf.count_or(header, "olmo2.attention.head_count_kv", heads),
        "rms_norm_eps": gguf.shortest_float32(header.number("olmo2.attention.layer_norm_rms_epsilon")),
        "rope_theta": gguf.shortest_float32(gguf.number_or(header, "olmo2.rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": gguf.vocabulary_size(header),
    }


def placements(header: GgufHeader, config: dict[str, Any]) -> list[Placement]:  # noqa: ARG001  (the config says all)
    """Where each tensor goes; rows of rotary pairs stay as they are."""
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    found = [
        Placement("token_embd.weight", "model.embed_tokens.weight", (vocabulary, width)),
        Placement("output_norm.weight", "model.norm.weight", (width,)),
    ]
    if not config["tie_word_embeddings"]:
        found.append(Placement("output.weight", "lm_head.weight", (vocabulary, width)))
    parts: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_q": ("self_attn.q_proj", (queries, width)),
        "attn_k": ("self_attn.k_proj", (keys, width)),
        "attn_v": ("self_attn.v_proj", (keys, width)),
        "attn_output": ("self_attn.o_proj", (width, queries)),
        "attn_q_norm": ("self_attn.q_norm", (queries,)),
        "attn_k_norm": ("self_attn.k_norm", (keys,)),
        "post_attention_norm": ("post_attention_layernorm", (width,)),
        "ffn_gate": ("mlp.gate_proj", (inner, width)),
        "ffn_up": ("mlp.up_proj", (inner, width)),
        "ffn_down": ("mlp.down_proj", (width, inner)),
        "post_ffw_norm": ("post_feedforward_layernorm", (width,)),
    }
    for layer in range(config["num_hidden_layers"]):
        for source, (target, shape) in parts.items():
            found.append(Placement(f"blk.{layer}.{source}.weight", f"model.layers.{layer}.{target}.weight", shape))
    return found


GGUF = GgufArchitecture("olmo2", config, placements, frozenset({"vocab_size"}))
