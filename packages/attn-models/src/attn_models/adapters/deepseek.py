"""DeepSeek-V2 and DeepSeek-V3 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from attn_core.errors import Incompatible, InvalidValue

from attn_models.adapters.base import Layout, Stored, needed, require_allowed, required_count
from attn_models.adapters.hf_config import Rope, common_hf_config, mscale, require_fields, rope_parameters
from attn_models.adapters.llama import BLOCK, FIXED, OUTSIDE, READS, LlamaAdapter
from attn_models.attention import LayerAttention, layer_attentions
from attn_models.decoder.config import DecoderConfig, Experts

# Parts that lie in one matrix of theirs, by its name.
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
    """Llama's names, with latents, the two halves of a head's expanded latent one after the other, and experts.

    Modules that predict later tokens stand behind the last of `layers`; so do copies of the embeddings for them.
    """

    model_type = "deepseek"
    head = OUTSIDE["unembedding.weight"]
    derived = re.compile(r"rotary_emb\.inv_freq$")

    def __init__(self, *, heads: int, layers: int, depth: int) -> None:
        self.heads, self.layers, self.depth = heads, layers, depth

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """One tensor for each parameter but those that are joined."""
        known, found = set(parameters), []
        parts = {part for joined in JOINED.values() for part in joined}
        for name in parameters:
            if name in OUTSIDE:
                found.append(Stored(OUTSIDE[name], (name,)))
                continue
            layer, rest = self._place(name)
            module, _, leaf = rest.rpartition(".")
            if rest == CORRECTION:
                found.append(Stored(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", (name,), exact=True))
            elif module not in parts:
                found.append(Stored(f"model.layers.{layer}.{_their_module(module)}.{leaf}", (name,)))
            elif any(module == first for first, _ in JOINED.values()):
                found.append(self._joined(name, module, leaf))
        return [stored for stored in found if known.issuperset(stored.parts)]

    def derives(self, name: str) -> bool:
        """Also what predicts later tokens where it is not asked for, and copies of the embeddings."""
        layer = LAYER.match(name)
        behind = layer is not None and int(layer[1]) >= self.layers
        return super().derives(name) or (behind and (not self.depth or name.endswith(COPIES)))

    def _place(self, name: str) -> tuple[str, str]:
        """Their number of the layer that holds the parameter, and its name there."""
        kind, number, rest = name.split(".", 2)
        if kind == "blocks":
            return number, rest
        return str(self.layers + int(number)), rest.removeprefix("block.")

    def _joined(self, name: str, module: str, leaf: str) -> Stored:
        theirs, ours = next((theirs, ours) for theirs, ours in JOINED.items() if ours[0] == module)
        layer, before = self._place(name)[0], name.removesuffix(f"{module}.{leaf}")
        parts = tuple(f"{before}{part}.{leaf}" for part in ours)
        return Stored(f"model.layers.{layer}.{theirs}.{leaf}", parts, groups=self.heads if theirs == BY_HEAD else 1)


def _their_module(ours: str) -> str:
    matrix = FEED_FORWARD.fullmatch(ours)
    if matrix is None:
        return NAMES.get(ours, ours)
    where = (matrix[1] or "").replace("shared.", "shared_experts.")
    return f"mlp.{where}{matrix[2]}_proj"


MECHANISM = "mla"
LATENT_EPS = 1e-6
# Options of the mechanism by their names for them.
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
DENSE = {name: value for name, value in FIXED.items() if name not in {"experts", "rope_interleave", "prediction_depth"}}


class DeepseekAdapter(LlamaAdapter):
    """Latent attention, and after the first layers small experts, some of which all tokens share."""

    architecture: ClassVar[str]
    routing: ClassVar[str]
    said: ClassVar[Mapping[str, tuple[Any, ...]]]
    reads = READS | {
        *SIZES,
        *EXPERTS,
        "scoring_func",
        "topk_method",
        "norm_topk_prob",
        "rope_interleave",
        "num_nextn_predict_layers",
    }
    fixed = DENSE | {"bias": False, "partial_rotary_factor": 1.0}

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of their config."""
        require_allowed(
            values, {"attention_bias": (False, None), "mlp_bias": (False, None), "moe_layer_freq": (1, None)}
        )
        require_allowed(values, self.said)
        heads = needed(values, "num_attention_heads")
        require_allowed(values, {"num_key_value_heads": (heads, None)})
        if "q_lora_rank" not in values:
            raise InvalidValue("q_lora_rank: is missing; null says that queries have no latent", field="q_lora_rank")
        own = {"num_key_value_heads": heads, "head_dim": needed(values, "qk_nope_head_dim"), "mlp_bias": False}
        plain = super().configure(dict(values) | own | {"attention_bias": False})
        sizes = {ours: needed(values, theirs) for theirs, ours in SIZES.items() if ours != "query_latent"}
        return dataclasses.replace(
            plain,
            key_value_heads=None,
            mechanism=MECHANISM,
            options=sizes
            | {
                "query_latent": values["q_lora_rank"],
                "norm_eps": LATENT_EPS,
                "score_factor": _score_factor(values, plain.rope_scaling),
            },
            rope_interleave=self.interleaved(values),
            **self._experts(values, plain.layers),
        )

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """A config.json of this family that transformers 5 reads."""
        require_fields(config, self.fixed, self.model_type)
        options = self._options(config)
        return {
            **common_hf_config(config, self.model_type, self.architecture),
            **{theirs: options[ours] for theirs, ours in SIZES.items()},
            "num_key_value_heads": config.heads,
            "head_dim": options["rotary_size"],
            "hidden_act": "silu",
            "rope_parameters": self._ropes(config, options["score_factor"]),
            "attention_bias": False,
            "first_k_dense_replace": config.layers if config.experts is None else config.first_k_dense_replace,
            **({} if config.mixture is None else self._described(config.mixture, config)),
        }

    def layout(self, config: DecoderConfig) -> Layout:
        """The names of its tensors, which depend on the heads and the number of layers."""
        return DeepseekLayout(heads=config.heads, layers=config.layers, depth=config.prediction_depth)

    def interleaved(self, values: Mapping[str, Any]) -> bool:  # noqa: ARG002  (only V3's can say)
        """Whether neighbours are turned together, or elements half a head apart."""
        return True

    def groups(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """To how many groups of experts a token is held; nothing where all are one group."""
        if values.get("n_group") in (None, 1):
            return {}
        return {"n_group": values.get("n_group"), "topk_group": values.get("topk_group")}

    def _experts(self, values: Mapping[str, Any], layers: int) -> dict[str, Any]:
        dense = required_count(values, "first_k_dense_replace", 0, least=0)
        if dense >= layers:
            return {}
        return {
            "experts": needed(values, "n_routed_experts"),
            "experts_per_token": needed(values, "num_experts_per_tok"),
            "n_shared_experts": values.get("n_shared_experts") or None,
            "moe_intermediate_size": needed(values, "moe_intermediate_size"),
            "routed_scaling_factor": values.get("routed_scaling_factor", 1.0),
            "first_k_dense_replace": dense,
            "routing": self.routing,
            **self.groups(values),
        }

    def _described(self, experts: Experts, config: DecoderConfig) -> dict[str, Any]:
        require_fields(config, {"routing": self.routing}, self.model_type)
        if not experts.shared:
            raise Incompatible(f"layers without shared experts cannot be said in a {self.model_type} config.json")
        return {
            "n_routed_experts": experts.count,
            "num_experts_per_tok": experts.per_token,
            "n_shared_experts": experts.shared,
            "moe_intermediate_size": experts.hidden,
            "routed_scaling_factor": float(experts.scale),
            "n_group": experts.groups,
            "topk_group": experts.topk_group,
        }

    def _options(self, config: DecoderConfig) -> dict[str, Any]:
        """The options of the mechanism, the same in all layers."""
        attentions = layer_attentions(config)
        if any(
            (other.mechanism, other.config) != (attentions[0].mechanism, attentions[0].config) for other in attentions
        ):
            raise Incompatible(f"layers that differ in attention cannot be said in a {self.model_type} config.json")
        options = latent_options(attentions[0], self.model_type)
        if options["norm_eps"] != LATENT_EPS:
            eps = options["norm_eps"]
            raise Incompatible(f"latent norms of eps {eps} cannot be said in a {self.model_type} config.json")
        return options

    def _ropes(self, config: DecoderConfig, score_factor: float) -> dict[str, Any]:
        scaling = config.rope_scaling
        described = rope_parameters(Rope(base=config.rope_theta, scaling=scaling))
        described.pop("partial_rotary_factor")
        if score_factor == 1:
            return described
        if scaling is None or scaling["factor"] <= 1:
            raise Incompatible(f"a score_factor of {score_factor} cannot be said without a stretching of positions")
        # Rounded to the digits that a person writes.
        return described | {
            "mscale_all_dim": round((math.sqrt(score_factor) - 1) / math.log(scaling["factor"]) * 10, 9)
        }


class DeepseekV2Adapter(DeepseekAdapter):
    """Softmax scores; a group of experts is as good as its best (DeepSeek-V2, arXiv 2405.04434)."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    routing = "deepseek_v2"
    fixed = DeepseekAdapter.fixed | {"rope_interleave": True, "prediction_depth": 0}
    said: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "rope_interleave": (True, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", "group_limited_greedy", None),
        "norm_topk_prob": (False, None),
    }

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """A DeepseekV2Config."""
        grouped = config.n_group is not None
        method = {"topk_method": "group_limited_greedy" if grouped else "greedy"}
        return super().describe(config) | method | {"norm_topk_prob": False}

    def groups(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """None where experts are chosen among all."""
        return super().groups(values) if values.get("topk_method") == "group_limited_greedy" else {}


class DeepseekV3Adapter(DeepseekAdapter):
    """Sigmoid scores and a bias for each expert; a group is as good as its best two (DeepSeek-V3, arXiv 2412.19437)."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    routing = "deepseek_v3"
    said: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "norm_topk_prob": (True, None),
    }

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """A DeepseekV3Config."""
        return super().describe(config) | {
            "rope_interleave": config.rope_interleave,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": config.prediction_depth,
        }

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder of a DeepseekV3Config."""
        depth = values.get("num_nextn_predict_layers") or 0
        return dataclasses.replace(super().configure(values), prediction_depth=depth)

    def filled(self, config: DecoderConfig, names: Iterable[str]) -> DecoderConfig:
        """Without modules that predict later tokens where their weights are not there: transformers leaves them out."""
        layers = {int(found[1]) for name in names if (found := LAYER.match(name))}
        return config if config.layers in layers else dataclasses.replace(config, prediction_depth=0)

    def interleaved(self, values: Mapping[str, Any]) -> bool:
        """Neighbours, unless it is said otherwise."""
        return bool(values.get("rope_interleave", True))


def latent_options(attention: LayerAttention, layout: str) -> dict[str, Any]:
    """The options of a layer of latent attention; raises `Incompatible` for any other."""
    mechanism, config = attention.mechanism, attention.config
    if mechanism.name != MECHANISM:
        raise Incompatible(
            f"mechanism {mechanism.name!r} cannot be said in a {layout} config.json", mechanism=mechanism.name
        )
    options = {name: getattr(config, name) for name in (*SIZES.values(), "norm_eps", "score_factor")}
    head = config.head_layout
    return options | {
        "nope_size": options["nope_size"] or head.key_size,
        "value_size": options["value_size"] or head.value_size,
    }


def _score_factor(values: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> float:
    """What scores are multiplied by where positions are stretched: m² of the weight `mscale_all_dim`."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    weight = given.get("mscale_all_dim")
    return 1.0 if scaling is None or not weight else mscale(scaling["factor"], weight) ** 2
