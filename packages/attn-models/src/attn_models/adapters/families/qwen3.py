"""Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.families.qwen2 import Qwen2Adapter
from attn_models.adapters.family import LLAMA_NAMES, QK_NORM


class Qwen3Adapter(Qwen2Adapter):
    """Qwen 2 with RMSNorm on the queries and keys of every head, and biases where they are asked for (Yang et al. 2025,
    arXiv 2505.09388)."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    fields = Qwen2Adapter.fields | {"bias": "attention_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward_bias": False}
    defaults = Qwen2Adapter.defaults | {"head_dim": 128}
    names = LLAMA_NAMES | QK_NORM

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """Norms of queries and keys, and the window of the layer if it has one."""
        return {"norm_eps": values["rms_norm_eps"]} | super().layer_options(values, layer)
