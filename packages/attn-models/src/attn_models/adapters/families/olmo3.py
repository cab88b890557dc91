"""OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.family import (
    FULL,
    LLAMA_FIELDS,
    LLAMA_NAMES,
    NORMS_AFTER,
    QK_NORM,
    SLIDING,
    FamilyAdapter,
    periodic_kinds,
)
from attn_models.adapters.hf_config import Rope, rope_parameters, ropes_of_kinds


class Olmo3Adapter(FamilyAdapter):
    """Norms after sublayers and over the queries and keys of all heads; three windowed layers to each full layer, whose
    rotary positions are scaled (Team OLMo 2025; arXiv 2501.00656 of OLMo 2)."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    fields = LLAMA_FIELDS | {"bias": "attention_bias"}
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary", "feed_forward_bias": False}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 4096}
    rope_base = 500000.0
    reads = frozenset({"layer_types"})
    names = LLAMA_NAMES | QK_NORM | NORMS_AFTER

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The norm of queries and keys, and the layer's window or rotary scaling."""
        kind = periodic_kinds(values, 4)[layer]
        options: dict[str, Any] = {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"}
        ropes = self._ropes(values)
        if kind == SLIDING:
            options["window"] = required_count(values, "sliding_window")
        if ropes[kind].base != ropes[SLIDING].base:
            options["base"] = ropes[kind].base
        return options if ropes[kind].scaling is None else options | {"scaling": ropes[kind].scaling}

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """The base of layers with a window; the scaling of full layers is an option of each layer."""
        return Rope(base=self._ropes(values)[SLIDING].base)

    def _ropes(self, values: Mapping[str, Any]) -> dict[str, Rope]:
        """By kind of layer. Raises `InvalidValue` for another base at the top level, which transformers 4 uses for all
        layers, transformers 5 for full ones only."""
        require_allowed(values, {"rope_theta": (self.rope_base, None)})
        return ropes_of_kinds(values, dict.fromkeys((FULL, SLIDING), ("", self.rope_base)))

    def rope_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """`rope_parameters` with one object for each kind of layer."""
        options = [config.choice(layer).options for layer in range(config.num_layers)]
        described: dict[str, Any] = {}
        for kind in (FULL, SLIDING):
            own = next((one for one in options if (one.get("window") is None) == (kind == FULL)), {})
            rope = Rope(base=own.get("base", config.rope_theta), scaling=own.get("scaling"))
            described[kind] = {k: v for k, v in rope_parameters(rope).items() if k != "partial_rotary_factor"}
        return {"rope_parameters": described}
