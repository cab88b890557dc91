"""The adapter for OLMo 2: maps keys of its config.json to fields of the decoder, and tensors to parameters.

It is Llama's decoder with two changes (arXiv 2501.00656, section 3.1). Norms follow the sublayers, inside the residual
branch: h = x + norm(attention(x)), y = h + norm(mlp(h)). Queries and keys are normalised before rotary positions are
applied, each by the mean square over all of its heads together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_models.adapters.family import GROUPED, LLAMA_NAMES, QK_NORM, FamilyAdapter

AFTER = {"attended_norm": "post_attention_layernorm", "fed_norm": "post_feedforward_layernorm"}


class Olmo2Adapter(FamilyAdapter):
    """Reads and writes checkpoint folders of `Olmo2ForCausalLM`.

    `attention_bias` adds biases to all four projections of attention, and to no other layer.
    """

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    fields = GROUPED | {"norm_eps": "rms_norm_eps", "head_dim": "head_dim", "bias": "attention_bias"}
    fixed = {"norm": "rms", "norm_place": "after", "positions": "rotary", "feed_forward_bias": False}
    defaults = {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    names = LLAMA_NAMES | QK_NORM | AFTER

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The options of the norm of queries and keys, the same in all layers."""
        return {"norm_eps": values["rms_norm_eps"], "norm_over": "all_heads"}
