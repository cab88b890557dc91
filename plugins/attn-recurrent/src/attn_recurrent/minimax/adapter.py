"""The layout of MiniMax-01's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attn_models.adapters.base import listed_layer_types, required_count
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QKV, BlockNames, FamilyAdapter
from attn_models.attention import layer_attentions

from attn_recurrent.minimax.config import FACTORS, LIGHTNING, MiniMaxConfig

FULL, LINEAR = "full_attention", "linear_attention"
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
EXPERTS = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_size",
}
LIGHTNING_NAMES = {
    "attention.norm": "self_attn.norm.weight",
    "attention.gate": "self_attn.output_gate",
    "attention.output": "self_attn.out_proj",
}


class MiniMaxAdapter(FamilyAdapter):
    """Lightning attention, softmax attention in the layers that `layer_types` lists, and experts in every layer."""

    model_type = "minimax"
    architecture = "MiniMaxForCausalLM"
    Config = MiniMaxConfig
    fields = GROUPED | EXPERTS | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"} | {one: one for one in FACTORS}
    fixed = {"norm": "rms", "positions": "rotary"}
    defaults = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "hidden_act": "silu"} | {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    allowed = {"sliding_window": (None,)}
    aliases = {"num_experts": "num_local_experts"}
    reads = frozenset({"layer_types", "block_size", "router_jitter_noise"})
    nulls = frozenset({"num_key_value_heads"})
    rope_base = 1e6
    names = (
        LLAMA_NAMES
        | {f"feed_forward.experts.{{}}.{one}": f"block_sparse_moe.experts.{{}}.{w}" for one, w in MATRICES.items()}
        | {"feed_forward.router.score": "block_sparse_moe.gate"}
    )
    kinds = {"attention.norm": BlockNames(LIGHTNING_NAMES, {"self_attn.qkv_proj": QKV})}
    derived_names = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(slope_rate|(query|key|diagonal)_decay)$")

    def build(self, config: Any) -> Any:
        """A new `MiniMaxDecoder`."""
        from attn_recurrent.minimax.model import MiniMaxDecoder

        return MiniMaxDecoder(config)

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:
        """Lightning attention where `layer_types` says so, else softmax attention."""
        return LIGHTNING if self._kinds(values)[layer] == LINEAR else ""

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The factor of the decays of a lightning layer, without positions, groups and weights to drop."""
        if self._kinds(values)[layer] == FULL:
            return {}
        factor = 1 - layer / (required_count(values, "num_hidden_layers") - 1 + 1e-5) + 1e-5
        own = {"dropout": 0.0} if values.get("attention_dropout") else {}
        return own | {"rotary": None, "num_kv_heads": None, "slope_factor": factor}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kind of each layer."""
        return {"layer_types": [LINEAR if each.full_name == LIGHTNING else FULL for each in layer_attentions(config)]}

    def fused_groups(self, config: Any) -> dict[str, int]:
        """The query, the key and the value of a head are neighbours."""
        return {"self_attn.qkv_proj": config.num_heads}

    def _kinds(self, values: Mapping[str, Any]) -> Sequence[str]:
        layers = required_count(values, "num_hidden_layers")
        given = listed_layer_types(values, layers, (FULL, LINEAR))
        return [LINEAR if each % 2 else FULL for each in range(layers)] if given is None else given
