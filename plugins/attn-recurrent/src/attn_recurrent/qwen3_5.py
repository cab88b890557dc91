"""Qwen3.5: Gated DeltaNet and gated attention, as in Qwen3-Next, in a layout of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import layer_kinds, required_count
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, BlockNames, FamilyAdapter, TextOfVisionModel
from attn_models.adapters.qwen3_next import SIZES, require_mechanism
from attn_models.attention import layer_attentions

FULL, LINEAR = "full_attention", "linear_attention"
SOFTMAX, DELTA = "attn-gated/gated", "attn-recurrent/gated_deltanet"
MATRICES = ("gate", "up", "down")
SHARED = "shared_expert_intermediate_size"
DELTA_NAMES = {
    "attention.gate": "linear_attn.in_proj_z",
    "attention.strength": "linear_attn.in_proj_b",
    "attention.fade": "linear_attn.in_proj_a",
    "attention.output": "linear_attn.out_proj",
    "attention.filters": "linear_attn.conv1d.weight",
    "attention.rate": "linear_attn.A_log",
    "attention.fade_bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm.weight",
}


class Qwen35Adapter(FamilyAdapter):
    """The text model. All gains are stored minus 1, except those of Gated DeltaNet; multi-token prediction modules are
    skipped."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    fields = GROUPED | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim"}
    fixed = {"norm": "rms", "positions": "rotary"}
    defaults = {"num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu"} | {
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    allowed = {"attention_bias": (False, None)}
    reads = frozenset({"layer_types", "full_attention_interval"})
    option_keys = {ours: theirs for theirs, ours in SIZES.items() if ours not in ("num_heads", "head_dim")}
    rotary_fraction = 0.25
    names = LLAMA_NAMES | QK_NORM
    fused = {"self_attn.q_proj": ("attention.query", "attention.inner.gate")}
    kinds = {
        "attention.filters": BlockNames(
            DELTA_NAMES, {"linear_attn.in_proj_qkv": ("attention.query", "attention.key", "attention.value")}
        )
    }
    centred = re.compile(r"^norm\.weight$|_norm\.weight$|attention\.norm\.\w+_gain$")
    depthwise = re.compile(r"attention\.filters$")
    derived_names = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:
        """Gated softmax attention in every fourth layer, or where `layer_types` says so, Gated DeltaNet elsewhere."""
        mechanism = SOFTMAX if self._kind(values, layer) == FULL else DELTA
        require_mechanism(mechanism, self.model_type)
        return mechanism

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norms of queries and keys, or the sizes of the recurrence, which has no attention weights to drop."""
        if self._kind(values, layer) == FULL:
            return {"norm_eps": values["rms_norm_eps"]}
        sizes = {ours: required_count(values, theirs) for theirs, ours in SIZES.items()}
        own = {"dropout": 0.0} if values.get("attention_dropout") else {}
        return sizes | own | {"rotary": None, "num_kv_heads": None, "norm_eps": values["rms_norm_eps"]}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kinds of layers, and the sizes of the recurrence."""
        attentions = layer_attentions(config)
        found = [each.config for each in attentions if each.full_name == DELTA]
        first: Any = found[0] if found else None
        if first is None:
            return {"layer_types": [FULL] * config.num_layers}
        sizes = first.sizes
        numbers = sizes.heads, sizes.key_heads, sizes.key, sizes.value, first.taps
        kinds = [LINEAR if each.full_name == DELTA else FULL for each in attentions]
        return {"layer_types": kinds, **dict(zip(SIZES, numbers, strict=True))}

    def fused_groups(self, config: Any) -> dict[str, int]:
        """The query and the gate of a head are neighbours."""
        return {"self_attn.q_proj": config.num_heads}

    def _kind(self, values: Mapping[str, Any], layer: int) -> str:
        period, layers = (
            required_count(values, "full_attention_interval", 4),
            required_count(values, "num_hidden_layers"),
        )
        kinds = layer_kinds(values, layers, (LINEAR, FULL), period)
        return kinds[layer % len(kinds)]


class Qwen35MoeAdapter(Qwen35Adapter):
    """Experts in every layer, one of which all tokens share through a gate."""

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    fields = {ours: theirs for ours, theirs in Qwen35Adapter.fields.items() if ours != "intermediate_size"} | {
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
    }
    fixed = Qwen35Adapter.fixed | {"routing": "mixtral", "shared_expert_gate": True}
    defaults = (
        Qwen35Adapter.defaults
        | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
        | {
            "moe_intermediate_size": 512,
            SHARED: 512,
        }
    )
    names = (
        Qwen35Adapter.names
        | {f"feed_forward.experts.{{}}.{one}": f"mlp.experts.{{}}.{one}_proj" for one in MATRICES}
        | {f"feed_forward.shared.{one}": f"mlp.shared_expert.{one}_proj" for one in MATRICES}
        | {"feed_forward.router.score": "mlp.gate", "feed_forward.shared_expert_gate": "mlp.shared_expert_gate"}
    )

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The shared expert, as a number of experts."""
        width, shared = (required_count(values, key) for key in ("moe_intermediate_size", SHARED))
        if shared % width:
            raise InvalidValue.of(SHARED, shared, f"a multiple of the moe_intermediate_size {width}")
        return {"n_shared_experts": shared // width, "intermediate_size": width}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The width of the shared expert, and the keys of the dense model."""
        return super().own_keys(config) | {SHARED: (config.n_shared_experts or 0) * config.expert_width}


class Qwen35VisionAdapter(TextOfVisionModel, Qwen35Adapter):
    """The published checkpoints, whose text model is one of two: the vision model is skipped, and images are not read.

    Models are written as `qwen3_5_text`.
    """

    text = Qwen35Adapter
    model_type = "qwen3_5"
    layers = "model.language_model.layers"
    reads = frozenset({"text_config", "vision_config"}) | {
        f"{word}_token_id" for word in ("image", "video", "vision_start", "vision_end")
    }
    names = Qwen35Adapter.names | {
        "embedding": "model.language_model.embed_tokens",
        "norm": "model.language_model.norm",
    }
    derived_names = re.compile(r"rotary_emb\.inv_freq$|^mtp\.|^model\.visual\.")
