"""DeepSeek-V2 and DeepSeek-V3 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attn_core import MechanismConfig
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import (
    KEYS,
    Layout,
    StoredTensor,
    inexpressible,
    needed,
    require_allowed,
    required_count,
)
from attn_models.adapters.hf_config import common_hf_config, require_fields
from attn_models.adapters.llama import BLOCK, FIXED, OUTSIDE, READS, LlamaAdapter
from attn_models.adapters.rope import Rope, mscale, one_rope_of, rope_parameters
from attn_models.attention import LayerAttention, layer_attentions

# Modules that a checkpoint joins in one matrix, by its name.
JOINED = {
    "self_attn.kv_a_proj_with_mqa": ("attention.latent", "attention.rotary_key"),
    "self_attn.kv_b_proj": ("attention.key_up", "attention.value_up"),
}
BY_HEAD = "self_attn.kv_b_proj"
NAMES = {
    "attention_norm": BLOCK["attention_norm"],
    "feed_forward_norm": BLOCK["feed_forward_norm"],
    "attention.query": "self_attn.q_proj",
    "attention.query_down": "self_attn.q_a_proj",
    "attention.query_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj",
    "attention.latent_norm": "self_attn.kv_a_layernorm",
    "attention.output": "self_attn.o_proj",
    "feed_forward.router.score": "mlp.gate",
    "attention.inner.indexer.query": "self_attn.indexer.wq_b",
    "attention.inner.indexer.key": "self_attn.indexer.wk",
    "attention.inner.indexer.norm": "self_attn.indexer.k_norm",
    "attention.inner.indexer.weight": "self_attn.indexer.weights_proj",
    "token_norm": "enorm",
    "hidden_norm": "hnorm",
    "join": "eh_proj",
    "norm": "shared_head.norm",
}
COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
CORRECTION = "feed_forward.router.correction"
FEED_FORWARD = re.compile(r"feed_forward\.(experts\.\d+\.|shared\.)?(gate|up|down)")
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DeepseekLayout(Layout):
    """Llama's names, with latent projections and experts.

    In `kv_b_proj` the key rows of a head come before its value rows. Multi-token prediction modules are numbered after
    the last of `layers` and hold copies of the embeddings.
    """

    model_type = "deepseek"
    head = OUTSIDE["unembedding.weight"]
    derived_names = re.compile(r"rotary_emb\.inv_freq$")

    def __init__(self, *, heads: int, layers: int, depth: int) -> None:
        self.heads, self.layers, self.depth = heads, layers, depth

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, or for each group of joined parameters."""
        known, found = set(parameters), []
        parts = {part for joined in JOINED.values() for part in joined}
        for name in parameters:
            if name in OUTSIDE:
                found.append(StoredTensor(OUTSIDE[name], (name,)))
                continue
            layer, rest = self._layer_and_name(name)
            module, _, leaf = rest.rpartition(".")
            if rest == CORRECTION:
                found.append(
                    StoredTensor(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (name,), float32=True)
                )
            elif module not in parts:
                found.append(StoredTensor(f"model.layers.{layer}.{_hf_module(module)}.{leaf}", (name,)))
            elif any(module == first for first, _ in JOINED.values()):
                found.append(self._joined(name, module, leaf))
        return [stored for stored in found if known.issuperset(stored.parameters)]

    def is_derived(self, name: str) -> bool:
        """Also true for multi-token prediction modules if the config has none, and for copies of the embeddings."""
        layer = LAYER.match(name)
        behind = layer is not None and int(layer[1]) >= self.layers
        return super().is_derived(name) or (behind and (not self.depth or name.endswith(COPIES)))

    def _layer_and_name(self, name: str) -> tuple[str, str]:
        """The layer number in the checkpoint that holds the parameter, and the parameter's name within the layer."""
        kind, number, rest = name.split(".", 2)
        if kind == "blocks":
            return number, rest
        return str(self.layers + int(number)), rest.removeprefix("block.")

    def _joined(self, name: str, module: str, leaf: str) -> StoredTensor:
        theirs, ours = next((theirs, ours) for theirs, ours in JOINED.items() if ours[0] == module)
        layer, before = self._layer_and_name(name)[0], name.removesuffix(f"{module}.{leaf}")
        parts = tuple(f"{before}{part}.{leaf}" for part in ours)
        return StoredTensor(
            f"model.layers.{layer}.{theirs}.{leaf}", parts, groups=self.heads if theirs == BY_HEAD else 1
        )


def _hf_module(ours: str) -> str:
    matrix = FEED_FORWARD.fullmatch(ours)
    if matrix is None:
        return NAMES.get(ours, ours)
    where = (matrix[1] or "").replace("shared.", "shared_experts.")
    return f"mlp.{where}{matrix[2]}_proj"


MECHANISM = "attn-variants/mla"
LATENT_EPS = 1e-6
SIZES = {
    "kv_lora_rank": "latent",
    "qk_rope_head_dim": "rotary_size",
    "qk_nope_head_dim": "nope_size",
    "v_head_dim": "value_size",
    "q_lora_rank": "query_latent",
}
EXPERTS = (
    "first_k_dense_replace",
    "moe_layer_freq",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
)
DENSE = {
    name: value
    for name, value in FIXED.items()
    if name not in {"num_experts", "rope_interleave", "num_nextn_predict_layers"}
}


class DeepseekAdapter(LlamaAdapter):
    """Multi-head latent attention, and after the first layers many small experts, some shared by all tokens."""

    architecture: ClassVar[str]
    mechanism: ClassVar[str] = MECHANISM
    sizes: ClassVar[Mapping[str, str]] = SIZES
    """Keys of config.json, and the options of the mechanism that they set."""
    fixed_options: ClassVar[Mapping[str, Any]] = {}
    """Further options, which are the same in all models of the family."""
    routing: ClassVar[str]
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]]
    routed_scaling_factor: ClassVar[float] = 1.0
    """The value of the key where it is missing."""

    known_keys = READS | {
        *SIZES,
        *EXPERTS,
        "scoring_func",
        "topk_method",
        "norm_topk_prob",
        "rope_interleave",
        "num_nextn_predict_layers",
    }
    required_fields = DENSE | {"bias": False}
    keys = (
        KEYS
        | {ours: theirs for theirs, ours in SIZES.items()}
        | {
            "num_experts": "n_routed_experts",
        }
    )

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a DeepseekV2Config or DeepseekV3Config."""
        require_allowed(
            values, {"attention_bias": (False, None), "mlp_bias": (False, None), "moe_layer_freq": (1, None)}
        )
        require_allowed(values, self.allowed_values)
        heads = needed(values, "num_attention_heads")
        require_allowed(values, {"num_key_value_heads": (heads, None)})
        if "q_lora_rank" not in values:
            raise InvalidValue("q_lora_rank: is missing; null means that queries have no latent", field="q_lora_rank")
        own = {"num_key_value_heads": heads, "head_dim": required_count(values, "qk_nope_head_dim"), "mlp_bias": False}
        plain = super().from_hf_config(dict(values) | own | {"attention_bias": False})
        sizes = {ours: needed(values, theirs) for theirs, ours in self.sizes.items() if ours != "query_latent"}
        return dataclasses.replace(
            plain,
            num_kv_heads=None,
            mechanism=self.mechanism,
            options=sizes
            | {
                "query_latent": values["q_lora_rank"],
                "norm_eps": LATENT_EPS,
                "score_factor": _score_factor(values, plain.rope_scaling),
            }
            | dict(self.fixed_options),
            rope_interleave=self.interleaved(values),
            **self._expert_fields(values, plain.num_layers),
        )

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of this family's config.json, as transformers 5 reads it."""
        require_fields(config, self.required_fields, self.model_type)
        options = self._options(config)
        return {
            **common_hf_config(config, self.model_type, self.architecture),
            **{theirs: options[ours] for theirs, ours in self.sizes.items()},
            "num_key_value_heads": config.num_heads,
            "head_dim": options["rotary_size"],
            "hidden_act": "silu",
            "rope_parameters": self._ropes(config, options["score_factor"]),
            "attention_bias": False,
            "first_k_dense_replace": config.num_layers if config.num_experts is None else config.first_k_dense_replace,
            **({} if config.num_experts is None else self._hf_experts(config)),
        }

    def computed(self, attention: LayerAttention) -> object:
        """See `StateDictAdapter`; latent sizes that are not given default to those of a head."""
        return super().computed(attention) if attention.full_name != self.mechanism else self._latent(attention)

    def _latent(self, attention: LayerAttention) -> object:
        config = dataclasses.replace(attention.config, dropout=0.0, num_kv_heads=None, head_dim=None)
        return dataclasses.replace(config, **self.latent_options(attention))

    def layout(self, config: DecoderConfig) -> Layout:
        """The layout of this decoder's tensors, which depends on the numbers of heads and layers."""
        return DeepseekLayout(heads=config.num_heads, layers=config.num_layers, depth=config.num_nextn_predict_layers)

    def interleaved(self, values: Mapping[str, Any]) -> bool:  # noqa: ARG002  (only V3's can say)
        """Whether a rotary pair is two neighbouring elements (true), or two elements half a head apart."""
        return True

    def groups(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields for groups of experts; empty with a single group."""
        if values.get("n_group") in (None, 1):
            require_allowed(values, {"topk_group": (1, None)})
            return {}
        return {"n_group": values.get("n_group"), "topk_group": values.get("topk_group")}

    def _expert_fields(self, values: Mapping[str, Any], layers: int) -> dict[str, Any]:
        dense = required_count(values, "first_k_dense_replace", 0, least=0)
        if dense >= layers:
            return {}
        return {
            "num_experts": needed(values, "n_routed_experts"),
            "num_experts_per_tok": needed(values, "num_experts_per_tok"),
            "n_shared_experts": values.get("n_shared_experts") or None,
            "moe_intermediate_size": needed(values, "moe_intermediate_size"),
            "routed_scaling_factor": values.get("routed_scaling_factor", self.routed_scaling_factor),
            "first_k_dense_replace": dense,
            "routing": self.routing,
            **self.groups(values),
        }

    def _hf_experts(self, config: DecoderConfig) -> dict[str, Any]:
        require_fields(config, {"routing": self.routing}, self.model_type)
        if config.n_shared_experts is None:
            raise Incompatible(f"layers without shared experts cannot be expressed in a {self.model_type} config.json")
        return {
            "n_routed_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "n_shared_experts": config.n_shared_experts,
            "moe_intermediate_size": config.expert_width,
            "routed_scaling_factor": config.routed_scaling_factor,
            "n_group": config.n_group or 1,
            "topk_group": config.topk_group or 1,
        }

    def _options(self, config: DecoderConfig) -> dict[str, Any]:
        """The options of the mechanism; raises `Incompatible` unless they are the same in all layers."""
        attentions = layer_attentions(config)
        if any(
            (other.mechanism, other.config) != (attentions[0].mechanism, attentions[0].config) for other in attentions
        ):
            raise Incompatible(
                f"layers that differ in attention cannot be expressed in a {self.model_type} config.json"
            )
        options = self.latent_options(attentions[0])
        if options["norm_eps"] != LATENT_EPS:
            eps = options["norm_eps"]
            raise Incompatible(f"latent norms of eps {eps} cannot be expressed in a {self.model_type} config.json")
        return options

    def latent_options(self, attention: LayerAttention) -> dict[str, Any]:
        """The options of a layer of the family's mechanism; raises `Incompatible` for any other mechanism."""
        mechanism, config = attention.mechanism, attention.config
        if attention.full_name != self.mechanism:
            message = f"mechanism {mechanism.name!r} cannot be expressed in a {self.model_type} config.json"
            raise Incompatible(message, mechanism=mechanism.name)
        require_options(config, self.fixed_options, self.model_type)
        options = {name: getattr(config, name) for name in (*self.sizes.values(), "norm_eps", "score_factor")}
        head = config.head_layout
        return options | {
            "nope_size": options["nope_size"] or head.key_size,
            "value_size": options["value_size"] or head.value_size,
        }

    def _ropes(self, config: DecoderConfig, score_factor: float) -> dict[str, Any]:
        scaling = config.rope_scaling
        described = rope_parameters(Rope(base=config.rope_theta, scaling=scaling))
        described.pop("partial_rotary_factor")
        if score_factor == 1:
            return described
        if scaling is None or scaling["factor"] <= 1:
            raise Incompatible(f"a score_factor of {score_factor} cannot be expressed without rotary scaling")
        # Rounded, so that the value is as short as one written by hand.
        return described | {
            "mscale_all_dim": round((math.sqrt(score_factor) - 1) / math.log(scaling["factor"]) * 10, 9)
        }


class DeepseekV2Adapter(DeepseekAdapter):
    """Softmax router scores; a group of experts is ranked by its best expert (DeepSeek-V2, arXiv 2405.04434)."""

    model_type = "deepseek_v2"
    aliases: ClassVar[Mapping[str, str]] = {"num_experts": "n_routed_experts"}
    architecture = "DeepseekV2ForCausalLM"
    routing = "deepseek_v2"
    required_fields = DeepseekAdapter.required_fields | {"rope_interleave": True, "num_nextn_predict_layers": 0}
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "rope_interleave": (True, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy", None),
        "norm_topk_prob": (False, None),
    }

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a DeepseekV2Config."""
        grouped = config.n_group is not None
        method = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
        return super().keys_of(config) | method | {"norm_topk_prob": False}

    def groups(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields for groups of experts; empty unless `topk_method` is "group_limited_greedy"."""
        return super().groups(values) if values.get("topk_method") == "group_limited_greedy" else {}


class DeepseekV3Adapter(DeepseekAdapter):
    """Sigmoid router scores with biases; groups ranked by their two best experts (DeepSeek-V3, arXiv 2412.19437)."""

    model_type = "deepseek_v3"
    aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    architecture = "DeepseekV3ForCausalLM"
    routing = "deepseek_v3"
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "norm_topk_prob": (True,),
    }
    routed_scaling_factor = 2.5

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The keys of a DeepseekV3Config."""
        return super().keys_of(config) | {
            "rope_interleave": config.rope_interleave,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": config.num_nextn_predict_layers,
        }

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Build the decoder config from a DeepseekV3Config."""
        require_allowed(values, {"head_dim": (values.get("qk_rope_head_dim"), None)})
        depth = values.get("num_nextn_predict_layers") or 0
        return dataclasses.replace(super().from_hf_config(values), num_nextn_predict_layers=depth)

    def without_missing(self, config: DecoderConfig, names: Iterable[str]) -> DecoderConfig:
        """Remove the multi-token prediction modules if their weights are missing: transformers does not save them."""
        layers = {int(found[1]) for name in names if (found := LAYER.match(name))}
        return config if config.num_layers in layers else dataclasses.replace(config, num_nextn_predict_layers=0)

    def interleaved(self, values: Mapping[str, Any]) -> bool:
        """The value of `rope_interleave`, true by default."""
        return bool(values.get("rope_interleave", True))


def require_options(config: MechanismConfig, options: Mapping[str, Any], layout: str) -> None:
    """Raise `Incompatible` for the options of a layer that differ from `options`."""
    changed = {name: given for name, value in options.items() if (given := getattr(config, name)) != value}
    if changed:
        raise inexpressible(changed, layout)


def _score_factor(values: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> float:
    """The factor of attention scores with scaled rotary positions: m², m being `mscale` of weight `mscale_all_dim`."""
    weight = one_rope_of(values).get("mscale_all_dim")
    return 1.0 if scaling is None or not weight else mscale(scaling["factor"], weight) ** 2
