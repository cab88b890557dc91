"""DeepSeek-V3.2 and GLM-5."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.deepseek import DeepseekV3Adapter
from attn_models.adapters.family import dense_first
from attn_models.attention import LayerAttention

INDEXER = {"index_n_heads": "index_heads", "index_head_dim": "index_size", "index_topk": "top"}
LAYER_KEYS = ("layer_types", "mlp_layer_types", "indexer_types")


class DeepseekV32Adapter(DeepseekV3Adapter):
    """DeepSeek-V3 with an indexer in every layer, whose heads pair the rotary elements in halves."""

    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    mechanism = "attn-sparse/sparse_mla"
    sizes: ClassVar[Mapping[str, str]] = {**DeepseekV3Adapter.sizes, **INDEXER}
    keys = DeepseekV3Adapter.keys | {ours: theirs for theirs, ours in INDEXER.items()}
    known_keys = DeepseekV3Adapter.known_keys | {*INDEXER, *LAYER_KEYS}
    fixed_options: ClassVar[Mapping[str, Any]] = {"index_interleaved": False}

    def from_hf_config(self, values: Mapping[str, Any]) -> Any:
        """Build the decoder config from a DeepseekV32Config, whose layers must all have an indexer of their own."""
        layers = required_count(values, "num_hidden_layers")
        require_allowed(
            values, {"layer_types": (["indexed_attention"] * layers, None), "rope_interleave": (True, None)}
        )
        require_allowed(values, {"q_lora_rank": (required_count(values, "q_lora_rank"),)})
        self.require_own_indexers(values, layers)
        given = dict(values)
        kinds = given.pop("mlp_layer_types", None)
        if kinds is not None:
            given["first_k_dense_replace"] = dense_first(kinds, layers)
        return super().from_hf_config(given)

    def require_own_indexers(self, values: Mapping[str, Any], layers: int) -> None:
        """Raise `InvalidValue` if a layer uses the selection of another one, which GLM-5 allows."""
        require_allowed(values, {"indexer_types": (["full"] * layers, None)})

    def computed(self, attention: LayerAttention) -> object:
        """See `StateDictAdapter`; `align` only has an effect in training."""
        if attention.full_name == self.mechanism:
            config: Any = attention.config
            attention = LayerAttention(attention.mechanism, dataclasses.replace(config, align=1.0))
        return super().computed(attention)


class GlmMoeDsaAdapter(DeepseekV32Adapter):
    """The layout of GLM-5, whose indexers pair neighbouring elements."""

    model_type = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    known_keys = DeepseekV32Adapter.known_keys | {"index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"}
    fixed_options: ClassVar[Mapping[str, Any]] = {"index_interleaved": True}

    def from_hf_config(self, values: Mapping[str, Any]) -> Any:
        """Build the decoder config from a GlmMoeDsaConfig."""
        return super().from_hf_config({"rms_norm_eps": 1e-5, **values})

    def require_own_indexers(self, values: Mapping[str, Any], layers: int) -> None:
        """See `DeepseekV32Adapter`."""
        super().require_own_indexers(values, layers)
        if values.get("indexer_types") is None:
            require_allowed(values, {"index_topk_pattern": ("F" * layers, None), "index_topk_freq": (1, None)})
