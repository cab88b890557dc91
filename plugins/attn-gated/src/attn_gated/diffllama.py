"""DiffLlama."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_models.adapters.base import required_count
from attn_models.adapters.family import LLAMA_FIELDS, LLAMA_NAMES, FamilyAdapter

LAMBDAS = "attention.inner.lambdas"


class DiffLlamaAdapter(FamilyAdapter):
    """Differential attention, whose pairs are half of the heads apart, in the blocks of Llama."""

    model_type = "diffllama"
    architecture = "DiffLlamaForCausalLM"
    fields = LLAMA_FIELDS | {"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"}
    fixed = {"norm": "rms", "positions": "rotary", "feed_forward_bias": False}
    defaults = {"num_key_value_heads": None, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False}
    allowed = {"attention_dropout": (0, None)}
    reads = frozenset({"lambda_std_dev"})
    nulls = frozenset()
    mechanism = "attn-gated/differential"
    names = LLAMA_NAMES
    ones = re.compile(r"attention\.inner\.norm\.weight$")

    def layer_options(self, values: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """The number of layers below, from which λ begins, and the norm of a pair."""
        required_count(values, "num_key_value_heads", values["num_attention_heads"])
        return {"depth": layer, "pairs": "halves", "norm_eps": values["rms_norm_eps"]}

    def split_rows(self, config: Any) -> dict[str, dict[str, int]]:
        """Four vectors from which λ is computed."""
        return {LAMBDAS: {f"self_attn.lambda_{one}": 1 for one in ("q1", "k1", "q2", "k2")}}

    def stored_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Each of these as a vector."""
        return {LAMBDAS: (config.head_dim or config.hidden_size // config.num_heads,)}
