"""Qwen3-Next checkpoints: three layers with a fixed state to one of softmax attention, and many small experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from attn_core import AttentionSpec, Causal, Heads
from attn_core.errors import Incompatible, InvalidValue
from attn_core.norms import QkNorm

from attn_models.decoder.attention import LayerAttention, layer_attentions
from attn_models.decoder.config import AttentionChoice, DecoderConfig
from attn_models.decoder.mixture import Experts
from attn_models.families.door import Layout, counted, layer_kinds, needed, refuse_others
from attn_models.families.llama import FIXED, READS, LlamaDoor
from attn_models.families.needs import require_mechanism
from attn_models.families.qwen3_next_layout import Qwen3NextLayout
from attn_models.families.said import require_fields, rope_of_all, sizes_of

FULL, LINEAR = "full_attention", "linear_attention"
SOFTMAX, DELTA = "gated", "gated_deltanet"
PACKAGES = {SOFTMAX: "attn-gated", DELTA: "attn-gated-deltanet"}
PERIOD = 4
ROTATED = 0.25
# Options of the recurrent mechanism by their names for them.
SIZES = {
    "linear_num_value_heads": "heads",
    "linear_num_key_heads": "key_heads",
    "linear_key_head_dim": "head_size",
    "linear_value_head_dim": "value_size",
    "linear_conv_kernel_dim": "taps",
}
# What a Qwen3NextConfig means by a key that is not there.
DEFAULTS = {
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 5632,
    "norm_topk_prob": True,
}
LAYERS = {"layer_types", "full_attention_interval", "decoder_sparse_step", "mlp_only_layers"}
ROUTING = {True: "mixtral", False: "switch"}


class Qwen3NextDoor(LlamaDoor):
    """Gated DeltaNet in most layers, gated attention with normed queries and keys in every fourth, and a mixture of
    experts one of which all tokens share (Qwen team 2025; arXiv 2412.06464, 2505.06708)."""

    model_type = "qwen3_next"
    reads = READS | DEFAULTS.keys() | LAYERS
    fixed = {key: value for key, value in FIXED.items() if key != "experts"} | {"bias": False}

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a Qwen3NextConfig; without its mechanisms raises `UnknownName` that says what to install."""
        refuse_others(values, {"attention_bias": (False, None), "decoder_sparse_step": (1, None)})
        values = DEFAULTS | {"partial_rotary_factor": ROTATED, "rms_norm_eps": 1e-6} | dict(values)
        if isinstance(values.get("rope_parameters"), Mapping):
            values["rope_parameters"] = {"partial_rotary_factor": ROTATED} | dict(values["rope_parameters"])
        plain = super().configure(values | {"attention_bias": False, "mlp_bias": False})
        period = counted(values, "full_attention_interval", PERIOD)
        kinds = layer_kinds(values, plain.layers, (LINEAR, FULL), period)
        for name in sorted({SOFTMAX if kind == FULL else DELTA for kind in kinds}):
            require_mechanism(name, PACKAGES[name], self.model_type)
        softmax = AttentionChoice(mechanism=SOFTMAX, options={"norm_eps": plain.norm_eps})
        sizes = {ours: needed(values, theirs) for theirs, ours in SIZES.items()}
        own = {"rotary": None, "key_value_heads": None, "norm_eps": plain.norm_eps}
        if plain.attention_dropout:
            # The delta rule has no weights to drop.
            own["dropout"] = 0.0
        delta = AttentionChoice(mechanism=DELTA, options=sizes | own)
        return dataclasses.replace(
            plain,
            mechanism=SOFTMAX,
            options=softmax.options,
            pattern=tuple(softmax if kind == FULL else delta for kind in kinds),
            **_experts(values, plain.layers),
        )

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """A Qwen3NextConfig that transformers 5 reads."""
        require_fields(config, self.fixed, self.model_type)
        attentions = layer_attentions(config)
        kinds = [LINEAR if attention.mechanism.name == DELTA else FULL for attention in attentions]
        for attention, kind in zip(attentions, kinds, strict=True):
            if kind == FULL:
                self._require_softmax(attention, config)
        return {
            **sizes_of(config, self.model_type, "Qwen3NextForCausalLM"),
            "hidden_act": "silu",
            "rope_parameters": rope_of_all(config),
            "attention_bias": False,
            "layer_types": kinds,
            **self._delta_sizes([a for a, kind in zip(attentions, kinds, strict=True) if kind == LINEAR], config),
            **_described_experts(config.mixture, config, self.model_type),
        }

    def layout(self, config: DecoderConfig) -> Layout:
        """The names of its tensors, which depend on the heads."""
        attentions = layer_attentions(config)
        groups = [a.config.sizes.key_heads if a.mechanism.name == DELTA else config.heads for a in attentions]  # type: ignore[attr-defined]
        return Qwen3NextLayout(groups)

    def _require_softmax(self, attention: LayerAttention, config: DecoderConfig) -> None:
        """Raises `Incompatible` unless the layer is softmax attention with norms and a gate for every element."""
        size = config.head_size or config.width // config.heads
        shared = config.key_value_heads or config.heads
        said = AttentionSpec(
            heads=Heads(query=config.heads, key_value=shared, key_size=size, value_size=size),
            mask=Causal(),
            norm=QkNorm(eps=config.norm_eps),
            rotary=config.rotary,
        )
        name, gates = attention.mechanism.name, getattr(attention.config, "per", None)
        if name != SOFTMAX or attention.mechanism.spec(attention.config) != said or gates != "element":
            message = f"mechanism {name!r} with these options cannot be said in a {self.model_type} config.json"
            raise Incompatible(message, mechanism=name)

    def _delta_sizes(self, attentions: list[LayerAttention], config: DecoderConfig) -> dict[str, Any]:
        if not attentions:
            return {}
        first: Any = attentions[0].config
        if any(attention.config != first for attention in attentions) or first.norm_eps != config.norm_eps:
            message = f"layers of {DELTA!r} that differ, or norms of another eps, cannot be said in a {self.model_type}"
            raise Incompatible(f"{message} config.json", mechanism=DELTA)
        found = first.sizes
        sizes = found.heads, found.key_heads, found.key, found.value, first.taps
        return dict(zip(SIZES, sizes, strict=True))


def _experts(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The decoder's fields for its experts; none where every layer has one feed-forward."""
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise InvalidValue.of("mlp_only_layers", dense, "the first layers, without a gap")
    if not values["num_experts"] or len(dense) == layers:
        return {}
    hidden, shared = counted(values, "moe_intermediate_size"), counted(values, "shared_expert_intermediate_size")
    if shared % hidden:
        allowed = f"a multiple of the moe_intermediate_size {hidden}"
        raise InvalidValue.of("shared_expert_intermediate_size", shared, allowed)
    return {
        "experts": values["num_experts"],
        "experts_per_token": needed(values, "num_experts_per_tok"),
        "routing": ROUTING[bool(values["norm_topk_prob"])],
        "shared_experts": shared // hidden,
        "shared_gate": True,
        "expert_hidden": hidden,
        "dense_layers": len(dense),
    }


def _described_experts(experts: Experts | None, config: DecoderConfig, layout: str) -> dict[str, Any]:
    if experts is None:
        return {"num_experts": 0}
    if not experts.gated or config.routing not in ROUTING.values():
        raise Incompatible(
            f"shared experts without a gate, or routing {config.routing!r}, cannot be said in a {layout}"
        )
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.hidden,
        "shared_expert_intermediate_size": experts.shared * experts.hidden,
        "norm_topk_prob": config.routing == ROUTING[True],
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.dense_layers)),
    }
