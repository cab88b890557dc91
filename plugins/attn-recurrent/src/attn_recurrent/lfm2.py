"""LFM2 (Liquid AI 2025, arXiv 2511.23404)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import listed_layer_types, require_allowed, required_count
from attn_models.adapters.family import GROUPED, BlockNames, FamilyAdapter
from attn_models.attention import layer_attentions

CONV, FULL = "conv", "full_attention"
ATTENTION = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention.norm.query_gain": "self_attn.q_layernorm.weight",
    "attention.norm.key_gain": "self_attn.k_layernorm.weight",
}
CONVOLUTION = {
    "attention.input": "conv.in_proj",
    "attention.output": "conv.out_proj",
    "attention.filters": "conv.conv.weight",
    "attention.filter_bias": "conv.conv.bias",
}


class Lfm2Adapter(FamilyAdapter):
    """Gated short convolutions in most layers, grouped attention with normed queries and keys in the others."""

    model_type = "lfm2"
    architecture = "Lfm2ForCausalLM"
    fields = {ours: theirs for ours, theirs in GROUPED.items() if ours != "attention_dropout"} | {
        "norm_eps": "norm_eps",
        "head_dim": "head_dim",
    }
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward": "swiglu"}
    defaults = {"num_key_value_heads": 8, "norm_eps": 1e-5, "tie_word_embeddings": True, "conv_L_cache": 3} | {
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
    }
    activations = {}
    allowed = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}
    reads = frozenset({"layer_types", "full_attn_idxs", "conv_bias", "block_ff_dim", "tie_embedding"})
    option_keys = {"taps": "conv_L_cache"}
    rope_base = 1e6
    names = ATTENTION | {
        "embedding": "model.embed_tokens",
        "norm": "model.embedding_norm",
        "unembedding": "lm_head",
        "attention_norm": "operator_norm",
        "feed_forward_norm": "ffn_norm",
        "feed_forward.gate": "feed_forward.w1",
        "feed_forward.up": "feed_forward.w3",
        "feed_forward.down": "feed_forward.w2",
    }
    kinds = {"attention.filters": BlockNames(CONVOLUTION)}
    depthwise = re.compile(r"attention\.filters$")

    def layer_mechanism(self, values: Mapping[str, Any], layer: int) -> str:
        """A convolution where `layer_types` says so, else softmax attention."""
        return "attn-recurrent/short_conv" if self._kinds(values)[layer] == CONV else ""

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The width and the biases of a convolution, or the norm of queries and keys."""
        if self._kinds(values)[layer] == FULL:
            return {"norm_eps": values["norm_eps"]}
        taps, bias = required_count(values, "conv_L_cache", least=2), bool(values.get("conv_bias"))
        return {"taps": taps, "bias": bias, "output_bias": bias, "rotary": None, "num_kv_heads": None}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inner size of the feed-forward, which the config.json gives before it is adjusted, and older keys."""
        width = required_count(values, "block_ff_dim" if "block_ff_dim" in values else "intermediate_size")
        if values["block_auto_adjust_ff_dim"]:
            multiple, factor = required_count(values, "block_multiple_of"), values["block_ffn_dim_multiplier"]
            width = int((1 if factor is None else factor) * int(2 * width / 3))
            width = multiple * ((width + multiple - 1) // multiple)
        tied = values.get("tie_embedding", values["tie_word_embeddings"])
        return {"intermediate_size": width, "tie_word_embeddings": bool(tied)}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The kind of each layer, and the sizes of the convolution."""
        convolutions = [each.config for each in layer_attentions(config) if each.full_name.endswith("/short_conv")]
        first: Any = convolutions[0] if convolutions else None
        kinds = [CONV if each.full_name.endswith("/short_conv") else FULL for each in layer_attentions(config)]
        sizes = {"conv_L_cache": first.taps, "conv_bias": first.bias} if first else {}
        return {"layer_types": kinds, "block_auto_adjust_ff_dim": False, **sizes}

    def _kinds(self, values: Mapping[str, Any]) -> list[str]:
        layers = required_count(values, "num_hidden_layers")
        given = listed_layer_types(values, layers, (CONV, FULL))
        full = values.get("full_attn_idxs")
        if full is not None and (not isinstance(full, list) or any(type(one) is not int for one in full)):
            raise InvalidValue.of("full_attn_idxs", full, "the numbers of the layers with attention")
        usual = [FULL if full is None or layer in full else CONV for layer in range(layers)]
        if given is not None and full is not None:
            require_allowed({"full_attn_idxs": usual}, {"full_attn_idxs": (given,)})
        return given or usual
