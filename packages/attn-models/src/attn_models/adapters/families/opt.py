"""OPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import needed, require_allowed
from attn_models.adapters.family import GELUS, SIZES, FamilyAdapter


class OptAdapter(FamilyAdapter):
    """GPT-3 blocks with ReLU; learned positions start at row 2 of their table (Zhang et al. 2022, arXiv 2205.01068)."""

    model_type = "opt"
    architecture = "OPTForCausalLM"
    fields = SIZES | {"intermediate_size": "ffn_dim", "bias": "enable_bias", "dropout": "dropout"}
    fixed = {"norm": "layer", "positions": "learned", "position_offset": 2, "norm_eps": 1e-5, "norm_bias": True}
    defaults = {
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
        "do_layer_norm_before": True,
    }
    activation_key, activations = "activation_function", GELUS
    allowed = {"layer_norm_elementwise_affine": (True,), "_remove_final_layer_norm": (False, None)}
    reads = frozenset({"word_embed_proj_dim", "layerdrop", "init_std"})
    layers = "model.decoder.layers"
    names = {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm",
        "unembedding": "lm_head",
        "attention_norm": "self_attn_layer_norm",
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.out_proj",
        "feed_forward_norm": "final_layer_norm",
        "feed_forward.up": "fc1",
        "feed_forward.down": "fc2",
    }

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The place of the norms; raises `InvalidValue` for embeddings of another width, as in the 350M model."""
        require_allowed(values, {"word_embed_proj_dim": (needed(values, "hidden_size"), None)})
        return {"norm_place": "pre" if values["do_layer_norm_before"] else "post"}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The place of the norms, and the width of the embeddings."""
        return {"do_layer_norm_before": config.norm_place == "pre", "word_embed_proj_dim": config.hidden_size}
