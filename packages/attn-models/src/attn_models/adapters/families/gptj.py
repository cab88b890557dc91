"""GPT-J."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import required_count
from attn_models.adapters.family import GELUS, FamilyAdapter
from attn_models.adapters.rope import Rope


class GptjAdapter(FamilyAdapter):
    """Parallel sublayers after one LayerNorm; interleaved, partial rotary positions (Wang and Komatsuzaki 2021)."""

    model_type = "gptj"
    architecture = "GPTJForCausalLM"
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": "n_positions",
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "intermediate_size": "n_inner",
        "norm_eps": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
        "attention_dropout": "attn_pdrop",
    }
    fixed = {"norm": "layer", "norm_place": "parallel_shared", "positions": "rotary", "rope_interleave": True} | {
        "bias": True,
        "attention_bias": False,
        "attention_output_bias": False,
        "unembedding_bias": True,
    }
    defaults = {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "rotary_dim": 64}
    aliases = {
        "max_position_embeddings": "n_positions",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    activation_key, activations = "activation_function", GELUS
    allowed = {"tie_word_embeddings": (False, None)}
    layers = "transformer.h"
    derived_names = re.compile(r"attn\.(bias|masked_bias|embed_positions)$")
    names = {
        "embedding": "transformer.wte",
        "norm": "transformer.ln_f",
        "unembedding": "lm_head",
        "attention_norm": "ln_1",
        "attention.query": "attn.q_proj",
        "attention.key": "attn.k_proj",
        "attention.value": "attn.v_proj",
        "attention.output": "attn.out_proj",
        "feed_forward.up": "mlp.fc_in",
        "feed_forward.down": "mlp.fc_out",
    }

    def rope(self, values: Mapping[str, Any]) -> Rope:
        """Rotary positions on the first `rotary_dim` elements of each head."""
        size = required_count(values, "n_embd") // required_count(values, "n_head")
        rotary_dim = required_count(values, "rotary_dim")
        if rotary_dim > size:
            raise InvalidValue.of("rotary_dim", rotary_dim, f"at most the {size} elements of a head")
        return Rope(fraction=rotary_dim / size)

    def rope_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The number of rotated elements of each head."""
        return {"rotary_dim": round(config.partial_rotary_factor * config.hidden_size / config.num_heads)}
