"""EXAONE 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.base import SLIDING, required_count
from attn_models.adapters.family import LLAMA_FIELDS, LLAMA_NAMES, NORMS_AFTER, QK_NORM, FamilyAdapter, periodic_kinds


class Exaone4Adapter(FamilyAdapter):
    """Norms after sublayers and of queries and keys; where there are windows, the other layers have no positions
    (LG AI Research 2025, arXiv 2507.11407)."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    fields = LLAMA_FIELDS
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary"}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 4096}
    reads = frozenset({"layer_types", "sliding_window_pattern"})
    names = LLAMA_NAMES | QK_NORM | NORMS_AFTER

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm of queries and keys, and a window or no positions."""
        window = values.get("sliding_window")
        period = 1 if window is None else required_count(values, "sliding_window_pattern", 4)
        kind = periodic_kinds(values, period)[layer]
        options = {"norm_eps": values["rms_norm_eps"]} | self.kind_options(values, kind)
        return options if window is None or kind == SLIDING else options | {"rotary": None}
