"""Command R (Cohere) and Command R7B and A (Cohere 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.base import FULL, require_allowed, required_count
from attn_models.adapters.family import GROUPED, LLAMA_NAMES, FamilyAdapter, periodic_kinds


class CohereAdapter(FamilyAdapter):
    """Parallel sublayers after one LayerNorm without biases, interleaved rotary pairs, scaled logits (Cohere 2024)."""

    model_type = "cohere"
    architecture = "CohereForCausalLM"
    fields = GROUPED | {"norm_eps": "layer_norm_eps", "bias": "attention_bias", "logit_scale": "logit_scale"}
    fixed = {"norm": "layer", "norm_place": "parallel_shared", "positions": "rotary", "rope_interleave": True} | {
        "feed_forward_bias": False,
        "norm_bias": False,
    }
    defaults = {"layer_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "logit_scale": 0.0625}
    allowed = {"use_qk_norm": (False, None)}
    rope_base = 500000.0
    names = {ours: theirs for ours, theirs in LLAMA_NAMES.items() if ours != "feed_forward_norm"}


class Cohere2Adapter(CohereAdapter):
    """Three layers with a window and rotary positions to each full layer without (Cohere 2025, arXiv 2504.00698)."""

    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"
    defaults = CohereAdapter.defaults | {"sliding_window": 4096}
    allowed = {}
    rope_base = 10000.0
    reads = frozenset({"layer_types", "sliding_window_pattern", "head_dim"})

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """A window with rotary positions, or neither."""
        period = required_count(values, "sliding_window_pattern", 4)
        kind = periodic_kinds(values, period)[layer]
        return {"rotary": None} if kind == FULL else self.kind_options(values, kind)

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """No fields; raises `InvalidValue` for a `head_dim` other than hidden size / number of heads."""
        size = required_count(values, "hidden_size") // required_count(values, "num_attention_heads")
        require_allowed(values, {"head_dim": (size, None)})
        return {}
