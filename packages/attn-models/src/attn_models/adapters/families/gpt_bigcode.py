"""GPT BigCode: SantaCoder and StarCoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.families.gptj import GptjAdapter
from attn_models.adapters.family import GELUS, QKV, FamilyAdapter

FLOAT32 = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")


class GptBigcodeAdapter(FamilyAdapter):
    """GPT-2 with one key/value head for all query heads (Ben Allal et al. 2023, arXiv 2301.03988)."""

    model_type = "gpt_bigcode"
    architecture = "GPTBigCodeForCausalLM"
    fields, aliases = GptjAdapter.fields, GptjAdapter.aliases
    fixed = {"norm": "layer", "positions": "learned", "bias": True}
    defaults = {
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "multi_query": True,
    }
    activation_key, activations = "activation_function", GELUS
    # Whether scores are computed in float32 only says how exactly.
    allowed = {"scale_attn_weights": (True, None), "add_cross_attention": (False, None)} | dict.fromkeys(
        FLOAT32, (True, False, None)
    )
    reads = frozenset({"num_key_value_heads"})
    layers = "transformer.h"
    derived_names = re.compile(r"attn\.(bias|masked_bias)$")
    names = GptjAdapter.names | {
        "positions": "transformer.wpe",
        "attention.output": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    fused = {"attn.c_attn": QKV}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """One key/value head, or as many as query heads."""
        return {"num_kv_heads": 1 if values["multi_query"] else None}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """Whether all query heads share one key/value head."""
        return {"multi_query": config.num_kv_heads == 1}

    def fused_groups(self, config: DecoderConfig) -> dict[str, int]:
        """With own keys and values, one block per head: its query, key and value."""
        return {} if config.num_kv_heads == 1 else {"attn.c_attn": config.num_heads}
