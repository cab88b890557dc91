"""MiniMax-M2 and MiniMax-M3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attn_core.errors import InvalidValue
from attn_models.adapters.base import listed_layer_types, objects_of, require_allowed, required_count
from attn_models.adapters.family import (
    GROUPED,
    LLAMA_NAMES,
    QK_NORM,
    FamilyAdapter,
    TextOfVisionModel,
    dense_first,
    shared_experts,
)
from attn_models.adapters.rope import Rope, one_rope_of
from attn_models.attention import layer_attentions

MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
EXPERTS = {
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "intermediate_size",
}


class MiniMaxM2Adapter(FamilyAdapter):
    """Queries and keys normed over all heads, a part of each head rotated, and experts chosen by sigmoids with biases
    in every layer."""

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    fields = GROUPED | EXPERTS | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"}
    fixed = {"norm": "rms", "positions": "rotary", "routing": "deepseek_v3"}
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "hidden_act": "silu"} | {
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }
    allowed = {"scoring_func": ("sigmoid", None), "use_qk_norm": (True, None), "qk_norm_type": ("per_layer", None)} | {
        "use_routing_bias": (True, None),
        "shared_intermediate_size": (0, None),
        "attention_bias": (False, None),
        "sliding_window": (None,),
    }
    reads = frozenset({"attn_type_list", "rotary_dim", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"})
    derived_names = re.compile(r"rotary_emb\.inv_freq$|(^|\.)mtp\.")
    aliases = {"num_experts": "num_local_experts"}
    nulls = frozenset()
    rope_base = 5e6
    rotary_fraction = 1.0
    mechanism = "attn-variants/gemma"
    names = (
        LLAMA_NAMES
        | QK_NORM
        | {f"feed_forward.experts.{{}}.{one}": f"block_sparse_moe.experts.{{}}.{w}" for one, w in MATRICES.items()}
        | {"feed_forward.router.score": "block_sparse_moe.gate"}
        | {"feed_forward.router.correction": "block_sparse_moe.e_score_correction_bias"}
    )

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """None: checks that every layer has softmax attention, as older files say by a list of ones."""
        layers = required_count(values, "num_hidden_layers")
        require_allowed(values, {"attn_type_list": ([1] * layers, None)})
        return {}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm over all heads."""
        return {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions, whose part of a head older files give in elements."""
        told = values.get("partial_rotary_factor", one_rope_of(values).get("partial_rotary_factor"))
        if told is not None or values.get("rotary_dim") is None:
            return super().rope(values)
        size, turned = required_count(values, "head_dim"), required_count(values, "rotary_dim", least=0)
        if turned > size:
            raise InvalidValue.of("rotary_dim", turned, f"at most the head_dim {size}")
        return super().rope({**values, "partial_rotary_factor": turned / size})


FULL, SPARSE = "full_attention", "minimax_m3_sparse"
INDEX = {
    "index_size": ("index_head_dim", "sparse_index_dim", 128),
    "block": ("index_block_size", "sparse_block_size", 128),
    "top": ("index_topk_blocks", "sparse_topk_blocks", 16),
    "local": ("index_local_blocks", "sparse_local_block", 1),
}
"""Options of `indexed_blocks`, their keys, those in `sparse_attention_config`, and the values without a key."""
HEADS = ("index_n_heads", "sparse_num_index_heads", 4)
CONFIG, SHARED = "sparse_attention_config", "shared_intermediate_size"
INDEXER = {"query": "q_proj", "key": "k_proj", "query_norm": "q_norm", "key_norm": "k_norm"}


class MiniMaxM3Adapter(FamilyAdapter):
    """The text model: blocks of keys that an indexer selects, in the layers that are listed, normed queries and keys,
    and experts beside shared ones. All gains are stored minus 1."""

    model_type = "minimax_m3_vl_text"
    architecture = "MiniMaxM3VLForCausalLM"
    fields = (
        GROUPED
        | EXPERTS
        | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim", "intermediate_size": "dense_intermediate_size"}
        | {"routed_scaling_factor": "routed_scaling_factor"}
    )
    fixed = {"norm": "rms", "positions": "rotary", "routing": "deepseek_v3", "feed_forward": "swiglu_clamped"}
    defaults = {"num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.0} | {
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        SHARED: 3072,
    }
    activations = {}
    allowed = {"hidden_act": ("silu", "swigluoai", None), "swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)} | {
        "attention_bias": (False, None),
    }
    reads = frozenset({"layer_types", "mlp_layer_types", "moe_layer_freq", "rotary_dim", "router_jitter_noise"}) | {
        *(SHARED, CONFIG, HEADS[0], *(key for key, _, _ in INDEX.values()))
    }
    option_keys = {ours: key for ours, (key, _, _) in INDEX.items()}
    aliases = {"num_experts": "num_local_experts"}
    nulls = frozenset()
    rope_base = 5e6
    rotary_fraction = 1.0
    names = (
        LLAMA_NAMES
        | QK_NORM
        | {f"attention.inner.{ours}": f"self_attn.indexer.{theirs}" for ours, theirs in INDEXER.items()}
        | {"feed_forward.router.score": "mlp.gate", "feed_forward.shared.down": "mlp.shared_experts.down_proj"}
        | {"feed_forward.router.correction": "mlp.gate.e_score_correction_bias"}
    )
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mlp.gate_up_proj": ("feed_forward.gate", "feed_forward.up"),
        "mlp.shared_experts.gate_up_proj": ("feed_forward.shared.gate", "feed_forward.shared.up"),
    }
    stacked: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mlp.experts.gate_up_proj": ("gate", "up"),
        "mlp.experts.down_proj": ("down",),
    }
    stacked_transposed = False
    centred = re.compile(r"^norm\.weight$|_norm\.weight$|attention\.norm\.\w+_gain$")

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:
        """Selected blocks in the layers that are listed, softmax attention in the others."""
        return "attn-sparse/indexed_blocks" if self._kinds(values)[layer] == SPARSE else "attn-variants/gemma"

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norms, and the sizes of the indexer and of its blocks."""
        norms = {"norm_eps": values["rms_norm_eps"]}
        if self._kinds(values)[layer] == FULL:
            return norms
        given = objects_of(values, CONFIG)[CONFIG]

        def size(key: str, older: str, usual: int) -> int:
            return required_count({key: given.get(older, values.get(key, usual))}, key)

        heads = size(*HEADS)
        require_allowed({HEADS[0]: heads}, {HEADS[0]: (values["num_key_value_heads"],)})
        return norms | {ours: size(*keys) for ours, keys in INDEX.items()}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The dense layers, which must be the first, and the shared expert, as a number of experts."""
        layers = required_count(values, "num_hidden_layers")
        kinds = values.get("mlp_layer_types")
        if kinds is None and values.get("moe_layer_freq") is not None:
            given = values["moe_layer_freq"]
            kinds = ["sparse" if one else "dense" for one in given] if isinstance(given, list) else given
        dense = 0 if kinds is None else dense_first(kinds, layers)
        shared = shared_experts(values, SHARED, "intermediate_size")
        return {"first_k_dense_replace": dense, "n_shared_experts": shared}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions; transformers rotates what `partial_rotary_factor` says, whatever `rotary_dim` is."""
        rope = super().rope(values)
        turned = int(required_count(values, "head_dim") * rope.fraction)
        require_allowed(values, {"rotary_dim": (turned, None)})
        return rope

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kinds of layers, the sizes of the indexer, and the width of the shared expert."""
        attentions = layer_attentions(config)
        found: list[Any] = [each.config for each in attentions if each.full_name.endswith("/indexed_blocks")]
        sizes = {key: getattr(found[0], ours) for ours, (key, _, _) in INDEX.items()} if found else {}
        dense = config.first_k_dense_replace
        return sizes | {
            "layer_types": [SPARSE if each.full_name.endswith("/indexed_blocks") else FULL for each in attentions],
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config.num_layers - dense),
            "index_n_heads": config.num_kv_heads or config.num_heads,
            "rotary_dim": int(attentions[0].config.head_layout.key_size * config.partial_rotary_factor),
            SHARED: (config.n_shared_experts or 0) * config.expert_width,
        }

    def _kinds(self, values: Mapping[str, Any]) -> Sequence[str]:
        layers = required_count(values, "num_hidden_layers")
        given, listed = objects_of(values, CONFIG)[CONFIG], values.get("layer_types")
        if listed is None and "sparse_attention_freq" in given:
            sparse = given["sparse_attention_freq"]
            listed = [SPARSE if one else FULL for one in sparse] if isinstance(sparse, list) else sparse
        found = listed_layer_types({"layer_types": listed}, layers, (FULL, SPARSE))
        return [FULL] * layers if found is None else found


class MiniMaxM3VisionAdapter(TextOfVisionModel, MiniMaxM3Adapter):
    """The published checkpoints, whose text model is one of two: the vision model is skipped, and images are not read.

    Models are written as `minimax_m3_vl_text`.
    """

    text = MiniMaxM3Adapter
    outer = ()
    model_type = "minimax_m3_vl"
    layers = "language_model.model.layers"
    reads = frozenset({"text_config", "vision_config", "projector_hidden_size", "merged_hidden_size"}) | {
        f"{word}_token_{what}" for word in ("image", "video") for what in ("id", "index")
    }
    names = {
        ours: f"language_model.{theirs}" if ours in ("embedding", "norm", "unembedding") else theirs
        for ours, theirs in MiniMaxM3Adapter.names.items()
    } | (
        {f"attention.inner.{ours}": f"self_attn.index_{theirs}" for ours, theirs in INDEXER.items()}
        | {f"feed_forward.experts.{{}}.{one}": f"block_sparse_moe.experts.{{}}.{w}" for one, w in MATRICES.items()}
        | {f"feed_forward.shared.{one}": f"block_sparse_moe.shared_experts.{one}_proj" for one in MATRICES}
        | {"feed_forward.router.score": "block_sparse_moe.gate"}
        | {"feed_forward.router.correction": "block_sparse_moe.e_score_correction_bias"}
    )
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    stacked: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    derived_names = re.compile(r"inv_freq$|(^|\.)mtp\.|^(vision_tower|multi_modal_projector|patch_merge_mlp)\.")
