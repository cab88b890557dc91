"""StarCoder 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import SLIDING
from attn_models.adapters.family import GELUS, GROUPED, LLAMA_NAMES, FamilyAdapter, kind_keys


class Starcoder2Adapter(FamilyAdapter):
    """Grouped heads in a window, LayerNorms, plain feed-forwards, biases (Lozhkov et al. 2024, arXiv 2402.19173)."""

    model_type = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    fields = GROUPED | {"norm_eps": "norm_epsilon", "head_dim": "head_dim", "bias": "use_bias"}
    fixed = {"norm": "layer", "positions": "rotary", "norm_bias": True}
    defaults = {
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    }
    activations = GELUS
    reads = frozenset({"sliding_window"})
    names = LLAMA_NAMES | {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The window, where there is one."""
        return {} if values.get("sliding_window") is None else self.kind_options(values, SLIDING)

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The window."""
        return {"sliding_window": kind_keys(config)["sliding_window"]}
