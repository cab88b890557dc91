"""OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.base import FULL, SLIDING
from attn_models.adapters.family import LLAMA_FIELDS, LLAMA_NAMES, NORMS_AFTER, QK_NORM, FamilyAdapter, periodic_kinds


class Olmo3Adapter(FamilyAdapter):
    """Norms after sublayers and over the queries and keys of all heads; three windowed layers to each full layer, whose
    rotary positions are scaled (Team OLMo 2025; arXiv 2501.00656 of OLMo 2)."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    fields = LLAMA_FIELDS | {"bias": "attention_bias"}
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary", "feed_forward_bias": False}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 4096}
    # Another base at the top level is that of all layers in transformers 4, of full ones only in 5.
    allowed = {"rope_theta": (5e5, None)}
    ropes = {kind: {"rope_theta": 5e5} for kind in (FULL, SLIDING)}
    rope_bases = {FULL: "rope_theta"}
    reads = frozenset({"layer_types"})
    names = LLAMA_NAMES | QK_NORM | NORMS_AFTER

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm of queries and keys, and the layer's window or rotary scaling."""
        own = self.kind_options(values, periodic_kinds(values, 4)[layer])
        return {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"} | own
