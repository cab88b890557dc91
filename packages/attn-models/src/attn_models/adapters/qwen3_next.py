"""Qwen3-Next checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from attn_core import AttentionSpec, Causal, Heads, installed
from attn_core.errors import Incompatible, InvalidValue, UnknownName
from attn_core.norms import QkNorm
from attn_schema.decoder import AttentionChoice, DecoderConfig

from attn_models.adapters.base import KEYS, Layout, StoredTensor, layer_kinds, needed, require_allowed, required_count
from attn_models.adapters.hf_config import common_hf_config, require_fields
from attn_models.adapters.llama import BLOCK, FIXED, OUTSIDE, READS, LlamaAdapter
from attn_models.adapters.rope import model_rope, rope_parameters
from attn_models.attention import LayerAttention, layer_attentions


def require_mechanism(full_name: str, layout: str) -> None:
    """Raise `UnknownName` with the package to install unless the mechanism `distribution/name` is installed."""
    try:
        installed().mechanisms.full_name(full_name)
    except UnknownName as error:
        package, _, name = full_name.rpartition("/")
        message = f"unknown mechanism {name!r}, which layers of a {layout} model use; pip install {package}"
        raise UnknownName(message, kind="mechanism", name=name, package=package) from error


NAMES = {name: theirs for name, theirs in BLOCK.items() if not name.startswith("attention.")} | {
    "feed_forward.router.score": "mlp.gate",
    "feed_forward.shared_expert_gate": "mlp.shared_expert_gate",
}
DELTA_NAMES = {
    "attention.rate": "linear_attn.A_log",
    "attention.fade_bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm.weight",
    "attention.filters": "linear_attn.conv1d.weight",
    "attention.output.weight": "linear_attn.out_proj.weight",
}
SOFTMAX_NAMES = {
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "attention.norm.query_gain": "self_attn.q_norm.weight",
    "attention.norm.key_gain": "self_attn.k_norm.weight",
}
# Checkpoint matrices that hold several parameters, with a part of each for every group of heads.
DELTA_JOINED = {
    "linear_attn.in_proj_qkvz.weight": ("query", "key", "value", "gate"),
    "linear_attn.in_proj_ba.weight": ("strength", "fade"),
}
SOFTMAX_JOINED = {"self_attn.q_proj.weight": ("query", "inner.gate")}
FILTERS = "attention.filters"
CENTRED = re.compile(r"norm\.weight|blocks\.\d+\.(\w+_norm\.weight|attention\.norm\.\w+_gain)")
QWEN_FEED_FORWARD = re.compile(r"feed_forward\.(experts\.\d+\.|shared\.)?(gate|up|down)\.weight")


class Qwen3NextLayout(Layout):
    """Llama's names outside attention; checkpoints store the gains of norms minus 1, except those of Gated DeltaNet.

    `groups` holds, for each layer, the number of equal row blocks in which joined matrices hold the parameters: the
    heads of a softmax attention layer, the key heads of a Gated DeltaNet layer. Multi-token prediction modules are
    skipped.
    """

    model_type = "qwen3_next"
    head = OUTSIDE["unembedding.weight"]
    derived_names = re.compile(r"rotary_emb\.inv_freq$|^mtp\.")

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = groups

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, or for each group of joined parameters."""
        recurrent = {name.split(".")[1] for name in parameters if name.endswith(FILTERS)}
        found = []
        for name in parameters:
            below = 1.0 if CENTRED.fullmatch(name) else 0.0
            if name in OUTSIDE:
                found.append(StoredTensor(OUTSIDE[name], (name,), offset=below))
                continue
            _, layer, rest = name.split(".", 2)
            joined = self._joined(layer, rest, recurrent=layer in recurrent)
            if joined is not None:
                found += [joined] if joined.parameters[0] == name else []
                continue
            theirs = (DELTA_NAMES if layer in recurrent else SOFTMAX_NAMES).get(rest) or hf_name(rest)
            single = rest == FILTERS
            found.append(StoredTensor(f"model.layers.{layer}.{theirs}", (name,), offset=below, depthwise=single))
        return found

    def _joined(self, layer: str, rest: str, *, recurrent: bool) -> StoredTensor | None:
        """The checkpoint matrix that holds this parameter and others; None where there is none."""
        for theirs, names in (DELTA_JOINED if recurrent else SOFTMAX_JOINED).items():
            parts = [f"attention.{name}.weight" for name in names]
            if rest in parts:
                ours = tuple(f"blocks.{layer}.{part}" for part in parts)
                return StoredTensor(f"model.layers.{layer}.{theirs}", ours, groups=self.groups[int(layer)])
        return None


def hf_name(rest: str) -> str:
    """The checkpoint's name, within a layer, of a parameter outside attention."""
    matrix = QWEN_FEED_FORWARD.fullmatch(rest)
    if matrix is not None:
        return f"mlp.{(matrix[1] or '').replace('shared.', 'shared_expert.')}{matrix[2]}_proj.weight"
    module, _, leaf = rest.rpartition(".")
    return f"{NAMES.get(module, module)}.{leaf}"


FULL, LINEAR = "full_attention", "linear_attention"
SOFTMAX, DELTA = "attn-gated/gated", "attn-recurrent/gated_deltanet"
PERIOD = 4
ROTATED = 0.25
# Keys of config.json, and the options of the recurrent mechanism that they set.
SIZES = {
    "linear_num_value_heads": "num_heads",
    "linear_num_key_heads": "key_heads",
    "linear_key_head_dim": "head_dim",
    "linear_value_head_dim": "value_size",
    "linear_conv_kernel_dim": "taps",
}
# The values of missing keys of a Qwen3NextConfig.
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


OWN_FIELDS = ("num_experts", "partial_rotary_factor")


class Qwen3NextAdapter(LlamaAdapter):
    """Gated DeltaNet in most layers, gated softmax attention with normed queries and keys in every fourth, and a
    mixture of experts, one of which all tokens share (Qwen team 2025; arXiv 2412.06464, 2505.06708)."""

    model_type = "qwen3_next"
    known_keys = READS | DEFAULTS.keys() | LAYERS
    keys = KEYS | {ours: theirs for theirs, ours in SIZES.items() if ours not in ("num_heads", "head_dim")}
    rotary_fraction = 0.25
    required_fields = {key: value for key, value in FIXED.items() if key not in OWN_FIELDS} | {"bias": False}

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a Qwen3NextConfig.

        Raises `UnknownName` with the package to install if a mechanism is missing.
        """
        require_allowed(values, {"attention_bias": (False, None), "decoder_sparse_step": (1, None)})
        values = DEFAULTS | {"rms_norm_eps": 1e-6} | dict(values)
        plain = super().from_hf_config(values | {"attention_bias": False, "mlp_bias": False})
        period = required_count(values, "full_attention_interval", PERIOD)
        kinds = layer_kinds(values, required_count(values, "num_hidden_layers"), (LINEAR, FULL), period)
        for name in sorted({SOFTMAX if kind == FULL else DELTA for kind in kinds}):
            require_mechanism(name, self.model_type)
        softmax = AttentionChoice(mechanism=SOFTMAX, options={"norm_eps": plain.norm_eps})
        sizes = {ours: needed(values, theirs) for theirs, ours in SIZES.items()}
        own = {"rotary": None, "num_kv_heads": None, "norm_eps": plain.norm_eps}
        if plain.attention_dropout:
            # The delta rule has no attention weights to drop.
            own["dropout"] = 0.0
        delta = AttentionChoice(mechanism=DELTA, options=sizes | own)
        return dataclasses.replace(
            plain,
            mechanism=SOFTMAX,
            options=softmax.options,
            pattern=tuple(softmax if kind == FULL else delta for kind in kinds),
            **_expert_fields(values, plain.num_layers),
        )

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a Qwen3NextConfig, as transformers 5 reads it."""
        require_fields(config, self.required_fields, self.model_type)
        attentions = layer_attentions(config)
        kinds = [LINEAR if attention.full_name == DELTA else FULL for attention in attentions]
        for attention, kind in zip(attentions, kinds, strict=True):
            if kind == FULL:
                self._require_softmax(attention, config)
        return {
            **common_hf_config(config, self.model_type, "Qwen3NextForCausalLM"),
            "hidden_act": "silu",
            "rope_parameters": rope_parameters(model_rope(config)),
            "attention_bias": False,
            "layer_types": kinds,
            **self._delta_sizes([a for a, kind in zip(attentions, kinds, strict=True) if kind == LINEAR], config),
            **_hf_experts(config, self.model_type),
        }

    def layout(self, config: DecoderConfig) -> Layout:
        """The layout of this decoder's tensors, which depends on the heads."""
        attentions = layer_attentions(config)
        groups = [a.config.sizes.key_heads if a.full_name == DELTA else config.num_heads for a in attentions]  # type: ignore[attr-defined]
        return Qwen3NextLayout(groups)

    def _require_softmax(self, attention: LayerAttention, config: DecoderConfig) -> None:
        """Raises `Incompatible` unless the layer is softmax attention with query/key norms and an elementwise gate."""
        size = config.head_dim or config.hidden_size // config.num_heads
        shared = config.num_kv_heads or config.num_heads
        expected = AttentionSpec(
            heads=Heads(query=config.num_heads, key_value=shared, key_size=size, value_size=size),
            mask=Causal(),
            norm=QkNorm(eps=config.norm_eps),
            rotary=config.rotary,
        )
        name, gates = attention.mechanism.name, getattr(attention.config, "per", None)
        if (
            attention.full_name != SOFTMAX
            or attention.mechanism.spec(attention.config) != expected
            or gates != "element"
        ):
            message = f"mechanism {name!r} with these options cannot be expressed in a {self.model_type} config.json"
            raise Incompatible(message, mechanism=name)

    def _delta_sizes(self, attentions: list[LayerAttention], config: DecoderConfig) -> dict[str, Any]:
        if not attentions:
            return {}
        first: Any = attentions[0].config
        if any(attention.config != first for attention in attentions) or first.norm_eps != config.norm_eps:
            message = (
                f"layers of {DELTA!r} that differ, or norms of another eps, cannot be expressed in a {self.model_type}"
            )
            raise Incompatible(f"{message} config.json", mechanism=DELTA)
        found = first.sizes
        sizes = found.heads, found.key_heads, found.key, found.value, first.taps
        return dict(zip(SIZES, sizes, strict=True))


def _expert_fields(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The fields for the experts; empty where every layer has a single feed-forward."""
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise InvalidValue.of("mlp_only_layers", dense, "the numbers of the first layers, without gaps")
    if not values["num_experts"] or len(dense) == layers:
        return {}
    hidden, shared = (
        required_count(values, "moe_intermediate_size"),
        required_count(values, "shared_expert_intermediate_size"),
    )
    if shared % hidden:
        allowed = f"a multiple of the moe_intermediate_size {hidden}"
        raise InvalidValue.of("shared_expert_intermediate_size", shared, allowed)
    return {
        "num_experts": values["num_experts"],
        "num_experts_per_tok": needed(values, "num_experts_per_tok"),
        "routing": ROUTING[bool(values["norm_topk_prob"])],
        "n_shared_experts": shared // hidden,
        "shared_expert_gate": True,
        "moe_intermediate_size": hidden,
        "first_k_dense_replace": len(dense),
    }


def _hf_experts(config: DecoderConfig, layout: str) -> dict[str, Any]:
    if config.num_experts is None:
        return {"num_experts": 0}
    if not config.shared_expert_gate or config.routing not in ROUTING.values():
        raise Incompatible(
            f"shared experts without a gate, or routing {config.routing!r}, cannot be expressed in a {layout}"
        )
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.expert_width,
        "shared_expert_intermediate_size": (config.n_shared_experts or 0) * config.expert_width,
        "norm_topk_prob": config.routing == ROUTING[True],
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.first_k_dense_replace)),
    }
