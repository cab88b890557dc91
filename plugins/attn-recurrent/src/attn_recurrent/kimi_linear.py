"""Kimi Linear (Kimi Team 2025, arXiv 2510.26692)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import listed_layer_types, objects_of, require_allowed, required_count
from attn_models.adapters.family import (
    KIMI_DELTA_NAMES,
    LLAMA_NAMES,
    SIZES,
    BlockNames,
    FamilyAdapter,
    dense_first,
)
from attn_models.attention import layer_attentions

DELTA, LATENT = "attn-variants/kda", "attn-variants/mla"
LATENT_EPS = 1e-6
"""The epsilon of the norms of latents, which is the default of their norm and not the config's."""
LATENT_SIZES = {
    "kv_lora_rank": "latent",
    "qk_rope_head_dim": "rotary_size",
    "qk_nope_head_dim": "nope_size",
    "v_head_dim": "value_size",
}
LINEAR = "linear_attn_config"
LINEAR_SIZES = {"num_heads": "num_heads", "head_dim": "head_dim", "short_conv_kernel_size": "convolution"}
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "routed_scaling_factor",
}
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
CONVOLUTION = "attention.convolution.weight"
DENSE = re.compile(r"block_sparse_moe(?=\.(gate|up|down)_proj\.)")
FULL, LINEAR_LAYER = "full_attention", "linear_attention"


class KimiLinearAdapter(FamilyAdapter):
    """Kimi Delta Attention in most layers, latent attention without rotary positions in the others, and experts."""

    model_type = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    fields = (
        {ours: theirs for ours, theirs in SIZES.items() if ours != "max_seq_len"}
        | EXPERTS
        | {
            "max_seq_len": "model_max_length",
            "norm_eps": "rms_norm_eps",
        }
    )
    fixed = {"norm": "rms", "positions": "none", "routing": "deepseek_v3"}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "model_max_length": 1 << 20, "first_k_dense_replace": 1} | {
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    allowed = {
        "attention_bias": (False, None),
        "q_lora_rank": (None,),
        "moe_layer_freq": (1,),
        "mla_use_nope": (True,),
    } | {
        "moe_renormalize": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "use_grouped_topk": (True,),
        "num_expert_group": (1,),
        "topk_group": (1,),
    }
    reads = frozenset(
        {LINEAR, "layer_types", "mlp_layer_types", "num_key_value_heads", "head_dim", "num_nextn_predict_layers"}
    ) | {
        "rope_theta",
        "rope_scaling",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
    }
    aliases = {
        "max_position_embeddings": "model_max_length",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "n_group": "num_expert_group",
        "norm_topk_prob": "moe_renormalize",
    }
    option_keys = {ours: theirs for theirs, ours in LATENT_SIZES.items()} | {"convolution": LINEAR}
    names = (
        LLAMA_NAMES
        | KIMI_DELTA_NAMES
        | {f"feed_forward.experts.{{}}.{one}": f"block_sparse_moe.experts.{{}}.{w}" for one, w in MATRICES.items()}
        | {f"feed_forward.shared.{one}": f"block_sparse_moe.shared_experts.{one}_proj" for one in MATRICES}
        | {"feed_forward.router.score": "block_sparse_moe.gate"}
        | {"feed_forward.router.correction": "block_sparse_moe.gate.e_score_correction_bias"}
    )
    fused = {
        "self_attn.kv_a_proj_with_mqa": ("attention.latent", "attention.rotary_key"),
        "self_attn.kv_b_proj": ("attention.key_up", "attention.value_up"),
    }
    kinds = {CONVOLUTION: BlockNames(KIMI_DELTA_NAMES)}
    depthwise = re.compile(r"attention\.convolution\.weight$")

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Dense feed-forwards are in `mlp`; transformers writes them below `block_sparse_moe` too."""
        return {DENSE.sub("mlp", name): name for name in names}

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:
        """Latent attention in the layers that `linear_attn_config` lists as full, else Kimi Delta Attention."""
        return LATENT if self._kinds(values)[layer] == FULL else DELTA

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The sizes of the layer."""
        if self._kinds(values)[layer] == FULL:
            sizes = {ours: required_count(values, theirs) for theirs, ours in LATENT_SIZES.items()}
            return sizes | {"base": None, "norm_eps": LATENT_EPS}
        linear = objects_of(values, LINEAR)[LINEAR]
        usual = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
        usual["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        numbers = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
        given = {key: linear.get(key, values.get(usual[key], numbers[key])) for key in LINEAR_SIZES}
        own = {"dropout": 0.0} if values.get("attention_dropout") else {}
        sizes = {ours: required_count(given, theirs) for theirs, ours in LINEAR_SIZES.items()}
        return sizes | own | {"norm_eps": values["rms_norm_eps"]}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The dense layers, which must be the first."""
        heads = required_count(values, "num_attention_heads")
        require_allowed(values, {"num_key_value_heads": (heads, None)})
        layers = required_count(values, "num_hidden_layers")
        dense = required_count(values, "first_k_dense_replace", least=0)
        kinds = values.get("mlp_layer_types")
        if kinds is not None:
            dense = dense_first(kinds, layers)
        return {"first_k_dense_replace": dense, "head_dim": required_count(values, "qk_nope_head_dim")}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The sizes of both kinds of layers, and which layers are of which kind, counted from 1."""
        layers = layer_attentions(config)
        full = [place for place, each in enumerate(layers, 1) if each.full_name == LATENT]
        linear = [place for place, each in enumerate(layers, 1) if each.full_name == DELTA]
        latent: Any = layers[full[0] - 1].config if full else None
        delta: Any = layers[linear[0] - 1].config if linear else None
        sizes = {theirs: getattr(latent, ours) for theirs, ours in LATENT_SIZES.items()} if latent else {}
        own = {theirs: getattr(delta, ours) for theirs, ours in LINEAR_SIZES.items()} if delta else {}
        return {
            **sizes,
            LINEAR: own | {"full_attn_layers": full, "kda_layers": linear},
            "num_key_value_heads": config.num_heads,
            "first_k_dense_replace": config.first_k_dense_replace,
        }

    def fused_groups(self, config: Any) -> dict[str, int]:
        """The key rows of a head come before its value rows."""
        return {"self_attn.kv_b_proj": config.num_heads}

    def split_rows(self, config: Any) -> dict[str, dict[str, int]]:
        """One convolution for queries, keys and values each."""
        width = self._width(config)
        return {CONVOLUTION: {f"self_attn.{one}_conv1d.weight": width for one in "qkv"}} if width else {}

    def stored_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Rates with axes of one, biases of all channels in one axis."""
        delta = next((each.config for each in layer_attentions(config) if each.full_name == DELTA), None)
        if delta is None:
            return {}
        return {"attention.rate": (1, 1, delta.num_heads, 1), "attention.step_bias": (self._width(config),)}

    def _width(self, config: Any) -> int:
        """The number of elements of all queries of a Kimi Delta layer; 0 without one."""
        found = [each.config for each in layer_attentions(config) if each.full_name == DELTA]
        return found[0].num_heads * found[0].head_layout.key_size if found else 0

    def _kinds(self, values: Mapping[str, Any]) -> Sequence[str]:
        layers = required_count(values, "num_hidden_layers")
        linear = objects_of(values, LINEAR)[LINEAR]
        listed = listed_layer_types(values, layers, (LINEAR_LAYER, FULL))
        if listed is not None:
            return listed
        full, kda = linear.get("full_attn_layers"), linear.get("kda_layers")
        places = [*(full or []), *(kda or [])]
        if not isinstance(full, list) or not isinstance(kda, list) or sorted(places) != list(range(1, layers + 1)):
            allowed = f"full_attn_layers and kda_layers, which together list the layers 1 to {layers}"
            raise InvalidValue.of(LINEAR, dict(linear), allowed)
        return [FULL if place in full else LINEAR_LAYER for place in range(1, layers + 1)]
