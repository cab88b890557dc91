"""The layout of GLM-5.3's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from attn_models.adapters.base import listed_layer_types, objects_of, require_allowed, required_count
from attn_models.adapters.family import (
    KIMI_DELTA_NAMES,
    LLAMA_NAMES,
    SIZES,
    FamilyAdapter,
    TextOfVisionModel,
    dense_first,
)
from attn_models.attention import layer_attentions

from attn_sparse.streams import StreamConfig

DELTA, SPARSE = "attn-variants/kda", "attn-sparse/sparse_mla"
INDEXED, LINEAR = "indexed_attention", "linear_attention"
LATENT_SIZES = {
    "latent": "kv_lora_rank", "query_latent": "q_lora_rank", "nope_size": "qk_nope_head_dim",
    "value_size": "v_head_dim", "index_heads": "index_n_heads", "index_size": "index_head_dim", "top": "index_topk",
    "pool": "index_kpool",
}  # fmt: skip
LINEAR_SIZES = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim", "convolution": "linear_conv_kernel_dim"}
GIVEN = {"num_heads": "num_heads", "head_dim": "head_dim", "convolution": "short_conv_kernel_size"}
"""The keys of published files, which are in an object of their own."""
OWN, BOUND = "linear_attn_config", "linear_lower_bound"
CONVOLUTION = "attention.convolution.weight"
MATRICES = ("gate", "up", "down")
STREAMS = {"function": "fn", "base": "base", "scale": "scale"}
COPIED = ("moe_intermediate_size", "routed_scaling_factor", "n_shared_experts", "num_experts_per_tok", "n_group")
INDEXER = {"query": "wq_b", "key": "wk", "norm": "k_norm", "weight": "weights_proj"} | {
    "pool_gate.weight": "index_kpool_compress_gate",
    "pool_bias": "index_kpool_compress_ape",
}


class Glm5NextAdapter(FamilyAdapter):
    """The text model: Kimi Delta Attention with bounded decays in most layers, in the others latent attention without
    positions to pools that an indexer selects; several residual streams, and experts beside shared ones."""

    model_type = "glm5_next_text"
    architecture = "Glm5NextTextModel"
    Config = StreamConfig
    fields = (
        SIZES
        | {name: name for name in (*COPIED, "topk_group", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps")}
        | {"norm_eps": "rms_norm_eps", "num_experts": "n_routed_experts"}
    )
    fixed = {"norm": "rms", "positions": "none", "routing": "deepseek_v3"}
    defaults = {
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "moe_intermediate_size": 2048, "n_routed_experts": 288,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "swiglu_limit": 10.0,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 256, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
        "index_kpool": 16, "linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, BOUND: -5.0,
    }  # fmt: skip
    allowed = {"attention_bias": (False, None), "qk_rope_head_dim": (0, None), "norm_topk_prob": (True, None)} | {
        "index_kpool_always_select_tail": (True, None),
        "index_topk_freq": (1, None),
    }
    reads = frozenset({OWN, "layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern"}) | {
        "index_skip_topk_offset",
        "num_key_value_heads",
        "head_dim",
        "first_k_dense_replace",
        "num_nextn_predict_layers",
    }
    aliases = {"num_local_experts": "n_routed_experts"}
    option_keys = LATENT_SIZES | {"convolution": LINEAR_SIZES["convolution"], "lower_bound": BOUND}
    nulls = frozenset({BOUND})
    names = (
        LLAMA_NAMES
        | KIMI_DELTA_NAMES
        | {f"attention.query_{one}": f"self_attn.q_{w}" for one, w in (("down", "a_proj"), ("up", "b_proj"))}
        | {"attention.query_norm": "self_attn.q_a_layernorm"}
        | {f"attention.inner.indexer.{one}": f"self_attn.indexer.{w}" for one, w in INDEXER.items()}
        | {f"feed_forward.experts.{{}}.{one}": f"mlp.experts.{{}}.{one}_proj" for one in MATRICES}
        | {f"feed_forward.shared.{one}": f"mlp.shared_experts.{one}_proj" for one in MATRICES}
        | {"feed_forward.router.score": "mlp.gate"}
        | {"feed_forward.router.correction": "mlp.gate.e_score_correction_bias"}
        | {
            f"{ours}_streams.{name}": f"hc_{theirs}_{word}"
            for ours, theirs in (("attention", "attn"), ("feed_forward", "ffn"))
            for name, word in STREAMS.items()
        }
    )
    fused = {
        "self_attn.kv_a_proj_with_mqa": ("attention.latent",),
        "self_attn.kv_b_proj": ("attention.key_up", "attention.value_up"),
    }
    depthwise = re.compile(r"attention\.convolution\.weight$")
    float32 = re.compile(r"_streams\.(base|scale)|\.(rate|step_bias|correction)$|convolution\.weight")

    def build(self, config: Any) -> Any:
        """A new `StreamDecoder`."""
        from attn_sparse.streams.model import StreamDecoder

        return StreamDecoder(config)

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:
        """Sparse latent attention in the layers that are indexed, else Kimi Delta Attention."""
        return SPARSE if self._kinds(values)[layer] == INDEXED else DELTA

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The sizes of the layer, and the bound of decays."""
        shared = {"norm_eps": values["rms_norm_eps"]} | ({"dropout": 0.0} if values.get("attention_dropout") else {})
        if self._kinds(values)[layer] == INDEXED:
            sizes = {ours: required_count(values, theirs) for ours, theirs in LATENT_SIZES.items()}
            return shared | sizes | {"rotary_size": 0}
        given = objects_of(values, OWN)[OWN]
        keys = {theirs: given.get(GIVEN[ours], values[theirs]) for ours, theirs in LINEAR_SIZES.items()}
        bound = given.get("gate_lower_bound", values[BOUND])
        if bound is None and given and given.get("safe_gate", True):
            bound = -5.0
        sizes = {ours: required_count(keys, theirs) for ours, theirs in LINEAR_SIZES.items()}
        return shared | sizes | {"lower_bound": bound}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The dense layers, which must be the first; every indexed layer must have an indexer of its own."""
        layers, heads = required_count(values, "num_hidden_layers"), required_count(values, "num_attention_heads")
        require_allowed(values, {"num_key_value_heads": (heads, None), "indexer_types": (["full"] * layers, None)})
        require_allowed(values, {"index_topk_pattern": ("F" * layers, ["full"] * layers, None)})
        kinds = values.get("mlp_layer_types")
        dense = min(3, layers) if kinds is None else dense_first(kinds, layers)
        return {"first_k_dense_replace": dense, "head_dim": required_count(values, "qk_nope_head_dim")}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The sizes of both kinds of layers, and which layers are of which kind."""
        layers: Sequence[Any] = layer_attentions(config)
        sparse = [each.config for each in layers if each.full_name == SPARSE]
        delta = [each.config for each in layers if each.full_name == DELTA]
        dense = config.num_layers if config.num_experts is None else config.first_k_dense_replace
        bound = delta[0].lower_bound if delta else None
        return {
            **({theirs: getattr(sparse[0], ours) for ours, theirs in LATENT_SIZES.items()} if sparse else {}),
            **({theirs: getattr(delta[0], ours) for ours, theirs in LINEAR_SIZES.items()} if delta else {}),
            BOUND: bound and float(bound),
            "layer_types": [INDEXED if each.full_name == SPARSE else LINEAR for each in layers],
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config.num_layers - dense),
            "num_key_value_heads": config.num_heads,
        }

    def layout(self, config: Any) -> FamilyAdapter:
        """As of `FamilyAdapter`; modules for multi-token prediction, which follow the last layer, are skipped."""
        bound = super().layout(config)
        behind = rf"layers\.{config.num_layers}\."
        bound.derived_names = re.compile(f"{self.derived_names.pattern}|{behind}")  # type: ignore[misc]
        return bound

    def fused_groups(self, config: Any) -> dict[str, int]:
        """The key rows of a head come before its value rows."""
        return {"self_attn.kv_b_proj": config.num_heads}

    def split_rows(self, config: Any) -> dict[str, dict[str, int]]:
        """One convolution for queries, keys and values each."""
        width = self._width(config)
        return {CONVOLUTION: {f"self_attn.{one}_conv1d.weight": width for one in "qkv"}}

    def stored_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Biases of all channels in one axis."""
        return {"attention.step_bias": (self._width(config),)}

    def _width(self, config: Any) -> int:
        """The number of elements of all queries of a Kimi Delta layer; 0 without one."""
        found = [each.config for each in layer_attentions(config) if each.full_name == DELTA]
        return found[0].num_heads * found[0].head_layout.key_size if found else 0

    def _kinds(self, values: Mapping[str, Any]) -> Sequence[str]:
        """The kinds of layers; where none are listed, every fourth is indexed."""
        layers = required_count(values, "num_hidden_layers")
        given = values.get("layer_types")
        if isinstance(given, list):
            given = [INDEXED if kind == "full_attention" else kind for kind in given]
        listed = listed_layer_types({"layer_types": given}, layers, (LINEAR, INDEXED))
        return listed or [LINEAR if layer % 4 != 3 else INDEXED for layer in range(layers)]


class Glm5NextVisionAdapter(TextOfVisionModel, Glm5NextAdapter):
    """The published checkpoints: images and videos are not read.

    Models are written as `glm5_next_text`.
    """

    text = Glm5NextAdapter
    model_type = "glm5_next"
    layers = "model.language_model.layers"
    reads = frozenset({"text_config", "vision_config"}) | {
        f"{word}_token_id" for kind in ("image", "video") for word in (kind, f"{kind}_start", f"{kind}_end")
    }
    names = {
        ours: theirs.replace("model.", "model.language_model.", 1) for ours, theirs in Glm5NextAdapter.names.items()
    }
    derived_names = re.compile(r"rotary_emb\.inv_freq$|^model\.visual\.")
