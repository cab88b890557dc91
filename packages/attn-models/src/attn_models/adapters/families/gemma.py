"""Gemma 2 and Gemma 3, the text models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core.errors import Incompatible
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import FULL, SLIDING, needed, required_count
from attn_models.adapters.family import LLAMA_FIELDS, LLAMA_NAMES, QK_NORM, FamilyAdapter, kind_keys, periodic_kinds


class Gemma2Adapter(FamilyAdapter):
    """Norms around sublayers, GEGLU, soft-capped scores and logits, windows in every other layer (arXiv 2408.00118)."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    fields = LLAMA_FIELDS | {"bias": "attention_bias", "final_logit_softcapping": "final_logit_softcapping"}
    fixed = {"norm": "rms", "norm_place": "both", "positions": "rotary", "scale_embedding": True} | {
        "feed_forward_bias": False
    }
    defaults = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 4096} | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    # Gemma 2's model ignores a period in its config.json.
    allowed = {"use_bidirectional_attention": (False, None), "sliding_window_pattern": (2, None)}
    activation_key, activations = "hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh"}
    option_keys = {"cap": "attn_logit_softcapping", "scale": "query_pre_attn_scalar"}
    reads = frozenset({"layer_types"})
    nulls = frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})
    period: ClassVar[int] = 2
    names = LLAMA_NAMES | {
        "attended_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "fed_norm": "post_feedforward_layernorm",
    }
    centred = re.compile(r"^norm\.weight$|_norm\.weight$|attention\.norm\.\w+_gain$")

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The scale, the soft cap and the window, and rotary positions that are not those of full layers."""
        kind = periodic_kinds(values, required_count(values, "sliding_window_pattern", self.period))[layer]
        scale, cap = required_count(values, "query_pre_attn_scalar") ** -0.5, values["attn_logit_softcapping"]
        return {"scale": scale, "cap": cap, "norm_eps": self.norm_eps(values)} | self.kind_options(values, kind)

    def norm_eps(self, values: Mapping[str, Any]) -> float | None:
        """The eps of the norms of queries and keys; None where there are none."""
        return None

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The kinds of layers, the cap and the scale, which must be 1/√n of a whole number n."""
        options = config.choice(0).options
        scale, cap = options.get("scale"), options.get("cap")
        scalar = config.head_dim or config.hidden_size // config.num_heads
        if scale is not None and (scalar := round(scale**-2)) ** -0.5 != scale:
            rule = f"a scale of {scale} is not 1/√n of a whole number n, as a {self.model_type} config.json requires"
            raise Incompatible(rule)
        capped = {} if self.model_type != Gemma2Adapter.model_type and cap is None else {"attn_logit_softcapping": cap}
        return kind_keys(config) | {"query_pre_attn_scalar": scalar} | capped


class Gemma3Adapter(Gemma2Adapter):
    """Norms of queries and keys instead of soft caps, five windowed layers to one full layer, each kind with its own
    rotary positions (arXiv 2503.19786). The text model only."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    defaults = Gemma2Adapter.defaults | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    allowed = {"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)}
    reads = frozenset({"layer_types", "sliding_window_pattern", "rope_local_base_freq"})
    names = Gemma2Adapter.names | QK_NORM
    period = 6
    ropes = {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}
    rope_bases = {FULL: "rope_theta", SLIDING: "rope_local_base_freq"}

    def norm_eps(self, values: Mapping[str, Any]) -> float | None:
        """The eps of the model's other norms."""
        eps: float = needed(values, "rms_norm_eps")
        return eps
