"""Granite with windows and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_models.adapters.base import FULL, SLIDING, required_count
from attn_models.adapters.families.granite import GraniteAdapter
from attn_models.adapters.family import LLAMA_NAMES, kind_keys, listed_kinds
from attn_models.attention import layer_attentions


class GraniteSwaAdapter(GraniteAdapter):
    """Granite with a learned sink in every head, a window in three of four layers, and a rotary base per layer."""

    model_type = "granite_swa"
    architecture = "GraniteSWAForCausalLM"
    defaults = (
        GraniteAdapter.defaults
        | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "sliding_window": 128}
        | {"tie_word_embeddings": True}
    )
    mechanism = "attn-variants/sink"
    reads = frozenset({"layer_types", "layer_rope_theta"})
    names = LLAMA_NAMES | {"attention.distribution.logit": "self_attn.sinks"}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The scale of the scores, a window, and the layer's own rotary base, of which 0 means no rotary positions."""
        layers, base = required_count(values, "num_hidden_layers"), self.rope(values).base
        kind = listed_kinds(values, [SLIDING if each % 4 else FULL for each in range(layers)])[layer]
        options = super().layer_options(values, layer) | self.kind_options(values, kind)
        given = values.get("layer_rope_theta")
        bases = [base] * layers if given is None else given
        if not isinstance(bases, list) or len(bases) != layers or any(type(one) not in (int, float) for one in bases):
            raise InvalidValue.of("layer_rope_theta", given, f"a number for each of {layers} layers")
        own = bases[layer]
        if own == base:
            return options
        return options | {"rotary": {"base": float(own)} if own else None}

    def own_keys(self, config: Any) -> dict[str, Any]:
        """The multipliers, and of each layer the kind and the rotary base."""
        specs = [each.mechanism.spec(each.config) for each in layer_attentions(config)]
        bases = [spec.rotary.base if spec is not None and spec.rotary is not None else 0 for spec in specs]
        return super().own_keys(config) | kind_keys(config) | {"layer_rope_theta": bases}
