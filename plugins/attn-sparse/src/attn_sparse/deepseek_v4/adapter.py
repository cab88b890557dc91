"""The layout of DeepSeek-V4's checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import needed, objects_of, require_allowed, required_count
from attn_models.adapters.family import SIZES, FamilyAdapter
from attn_models.adapters.rope import Rope, model_rope, one_rope_of, rope_of, rope_parameters
from attn_models.attention import layer_attentions

from attn_sparse.deepseek_v4 import DeepseekV4Config

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
OLDER_RATES = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""The kinds of layers by the numbers in `compress_ratios`, as published files give them."""
HASHED, ROUTED = "hash_moe", "moe"
OPTIONS = {
    "window": "sliding_window",
    "query_latent": "q_lora_rank",
    "output_groups": "o_groups",
    "output_latent": "o_lora_rank",
}
INDEXER = {"top": "index_topk", "index_heads": "index_n_heads", "index_size": "index_head_dim"}
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
ENTRIES = {"value": "wkv", "gate": "wgate", "norm": "norm"}
OWN = {name: name for name in ("hc_mult", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit", "moe_intermediate_size")}


class DeepseekV4Adapter(FamilyAdapter):
    """Windows, with compressed rows of earlier tokens in most layers, and experts beside shared ones in all layers.

    Names are those that transformers writes; published files, which lack the first component of most of them, are read
    as well.
    """

    model_type = "deepseek_v4"
    architecture = "DeepseekV4ForCausalLM"
    Config = DeepseekV4Config
    mechanism = "attn-sparse/compressed"
    fields = (
        {ours: theirs for ours, theirs in SIZES.items() if ours != "intermediate_size"}
        | OWN
        | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim", "routed_scaling_factor": "routed_scaling_factor"}
        | {"num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok"}
        | {"n_shared_experts": "n_shared_experts"}
    )
    fixed = {"norm": "rms", "positions": "rotary", "routing": "deepseek_v3", "rope_interleave": True}
    defaults = {
        "head_dim": 512, "rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5, "n_routed_experts": 256,
        "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "swiglu_limit": 10.0, "hidden_act": "silu", "sliding_window": 128,
        "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "index_topk": 512, "index_n_heads": 64,
        "index_head_dim": 128,
    }  # fmt: skip
    allowed = {"attention_bias": (False, None), "mlp_bias": (False, None), "num_key_value_heads": (1, None)} | {
        "n_shared_experts": (1,),
        "scoring_func": ("sqrtsoftplus", None),
        "topk_method": ("noaux_tc", None),
        "norm_topk_prob": (True, None),
    }
    reads = frozenset({"layer_types", "compress_ratios", "compress_rates", "mlp_layer_types", "num_hash_layers"}) | {
        *OLDER_RATES.values(),
        "compress_rope_theta",
        "qk_rope_head_dim",
        "num_nextn_predict_layers",
        "expert_dtype",
        "router_jitter_noise",
    }
    option_keys = OPTIONS | INDEXER
    aliases = {"num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size"}
    nulls = frozenset()
    names = (
        {"embedding": "model.embed_tokens", "norm": "model.norm", "unembedding": "head"}
        | {f"norm.{ours}": f"model.hc_head.hc_{theirs}" for ours, theirs in (("function", "fn"), ("base", "base"))}
        | {"norm.scale": "model.hc_head.hc_scale", "attention_norm": "attn_norm", "feed_forward_norm": "ffn_norm"}
        | {f"attention.query_{one}": f"attn.{w}" for one, w in (("down", "wq_a"), ("norm", "q_norm"), ("up", "wq_b"))}
        | {"attention.entry": "attn.wkv", "attention.entry_norm": "attn.norm", "attention.sinks": "attn.attn_sink"}
        | {"attention.output_down": "attn.wo_a", "attention.output": "attn.wo_b"}
        | {
            f"attention.{part}compressor.{ours}": f"attn.{part}compressor.{theirs}"
            for part in ("", "indexer.")
            for ours, theirs in (ENTRIES | {"bias": "ape"}).items()
        }
        | {"attention.indexer.query": "attn.indexer.wq_b", "attention.indexer.weight": "attn.indexer.weights_proj"}
        | {
            f"{ours}_streams.{name}": f"hc_{theirs}_{word}"
            for ours, theirs in (("attention", "attn"), ("feed_forward", "ffn"))
            for name, word in (("function", "fn"), ("base", "base"), ("scale", "scale"))
        }
        | {f"feed_forward.experts.{{}}.{one}": f"ffn.experts.{{}}.{w}" for one, w in MATRICES.items()}
        | {f"feed_forward.shared.{one}": f"ffn.shared_experts.{w}" for one, w in MATRICES.items()}
        | {"feed_forward.router.score": "ffn.gate", "feed_forward.router.correction": "ffn.gate.bias"}
        | {"feed_forward.router.table": "ffn.gate.tid2eid"}
    )
    float32 = re.compile(r"_streams\.|^norm\.(function|base|scale)|\.sinks|compressor\.bias|router\.correction")
    derived_names = re.compile(r"rotary_emb\.|^mtp\.")

    def build(self, config: Any) -> Any:
        """A new `DeepseekV4Decoder`."""
        from attn_sparse.deepseek_v4.model import DeepseekV4Decoder

        return DeepseekV4Decoder(config)

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The number of first layers whose experts a token's id chooses."""
        layers, kinds = required_count(values, "num_hidden_layers"), values.get("mlp_layer_types")
        if kinds is None:
            return {"num_hash_layers": min(layers, required_count(values, "num_hash_layers", 3, least=0))}
        hashed = kinds.count(HASHED) if isinstance(kinds, list) else 0
        if kinds != [HASHED] * hashed + [ROUTED] * (layers - hashed):
            allowed = f"{HASHED!r} or {ROUTED!r} for each of {layers} layers, the former first"
            raise InvalidValue.of("mlp_layer_types", kinds, allowed)
        return {"num_hash_layers": hashed}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The window, the blocks of compressed rows, the sizes of the indexer, and rotary positions."""
        kind = self._kinds(values)[layer]
        options: dict[str, Any] = {ours: required_count(values, theirs) for ours, theirs in OPTIONS.items()}
        options |= {"norm_eps": values["rms_norm_eps"], "every": None, "top": None}
        if kind == SLIDING:
            return options
        given = objects_of(values, "compress_rates")["compress_rates"]
        rates = {one: values.get(OLDER_RATES[one]) or given.get(one, rate) for one, rate in RATES.items()}
        options |= {"every": required_count(rates, kind, least=2), "overlap": kind == SPARSE}
        if kind == SPARSE:
            options |= {ours: required_count(values, theirs) for ours, theirs in INDEXER.items()}
        rope = self._ropes(values)[1]
        return options | {"rotary": {"base": rope.base, "fraction": rope.fraction, "scaling": rope.scaling}}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The rotary positions of layers without compressed rows; those of the others are an option."""
        return self._ropes(values)[0]

    def rope_keys(self, config: Any) -> dict[str, Any]:
        """`rope_parameters` with one object for each of both."""
        main = model_rope(config)
        other = [options["rotary"] for _, options in self._layers(config) if options.get("rotary") is not None]
        both = {"main": main, "compress": Rope(**other[0]) if other else main}
        return {
            "rope_parameters": {name: rope_parameters(rope) for name, rope in both.items()},
            "partial_rotary_factor": config.partial_rotary_factor,
        }

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kinds of layers, the sizes of their attention, and the number of key and value heads, one."""
        layers: list[Any] = [attention.config for attention in layer_attentions(config)]
        kinds = [SLIDING if one.every is None else SPARSE if one.indexed else HEAVY for one in layers]
        indexed = [one for one in layers if one.indexed]
        hashed = config.num_hash_layers
        return {
            **{theirs: getattr(layers[0], ours) for ours, theirs in OPTIONS.items()},
            **({theirs: getattr(indexed[0], ours) for ours, theirs in INDEXER.items()} if indexed else {}),
            "layer_types": kinds,
            "compress_rates": RATES | {kind: one.every for kind, one in zip(kinds, layers, strict=True) if one.every},
            "mlp_layer_types": [HASHED] * hashed + [ROUTED] * (config.num_layers - hashed),
            "num_key_value_heads": 1,
        }

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """The names that transformers writes, to those in the file, which may be published ones."""
        found = {}
        for name in names:
            ours = re.sub(r"\.attn\.kv_norm\.", ".attn.norm.", name)
            ours = re.sub(r"^embed\.", "embed_tokens.", re.sub(r"^hc_head_", "hc_head.hc_", ours))
            outside = ours.startswith(("model.", "head.", "mtp."))
            found[ours if outside else f"model.{ours}"] = name
        return found

    def _layers(self, config: Any) -> list[tuple[str, Mapping[str, Any]]]:
        choices = map(config.choice, range(config.num_layers))
        return [(choice.mechanism, choice.options) for choice in choices]

    def _kinds(self, values: Mapping[str, Any]) -> list[str]:
        """The kinds of layers: those listed or, without a list, two heavily compressed ones before pairs of both."""
        layers = required_count(values, "num_hidden_layers")
        listed, ratios = values.get("layer_types"), values.get("compress_ratios")
        if listed is None and isinstance(ratios, list):
            listed = [RATIOS.get(ratio, ratio) for ratio in ratios]
        if listed is None:
            listed = [HEAVY] * min(layers, 2) + [SPARSE if layer % 2 else HEAVY for layer in range(layers - 2)]
        if not isinstance(listed, list) or len(listed) < layers or not set(listed) <= {SLIDING, SPARSE, HEAVY}:
            allowed = f"{SLIDING!r}, {SPARSE!r} or {HEAVY!r} for each of {layers} layers"
            raise InvalidValue.of("layer_types", listed, allowed)
        return listed[:layers]

    def _ropes(self, values: Mapping[str, Any]) -> tuple[Rope, Rope]:
        """The rotary positions of layers without compressed rows, and of the others."""
        given = one_rope_of(values)
        turned = values.get("partial_rotary_factor")
        if turned is None:
            turned = required_count(values, "qk_rope_head_dim", 64) / required_count(values, "head_dim")
        nested = objects_of(given, "main", "compress")
        if all(nested.values()):
            main, compress = nested["main"], dict(nested["compress"])
        else:
            require_allowed(given, {"main": (None,), "compress": (None,)})
            part = {"partial_rotary_factor": turned}
            main = part | {"rope_theta": values.get("rope_theta", 10000.0)}
            compress = {**given, **part, "rope_theta": values.get("compress_rope_theta", 160000.0)}
            if compress.get("rope_type", compress.get("type")) == "yarn":
                # The published model does not multiply rotated rows by YaRN's factor.
                compress = {"attention_factor": 1.0, **compress}
        context = {"original_max_position_embeddings": values.get("max_position_embeddings")}
        found = [rope_of({**context, **one}) for one in (main, compress)]
        for one in (main, compress):
            needed(one, "rope_theta")
            needed(one, "partial_rotary_factor")
        return found[0], found[1]
