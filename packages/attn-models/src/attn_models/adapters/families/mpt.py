"""MPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

from attn_models.adapters.base import require_allowed, required_count
from attn_models.adapters.family import QKV, FamilyAdapter


class MptAdapter(FamilyAdapter):
    """GPT blocks with ALiBi and without biases (MosaicML 2023)."""

    model_type = "mpt"
    architecture = "MptForCausalLM"
    fields = {
        "vocab_size": "vocab_size",
        "max_seq_len": "max_seq_len",
        "hidden_size": "d_model",
        "num_layers": "n_layers",
        "num_heads": "n_heads",
        "norm_eps": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    fixed = {"norm": "layer", "positions": "none", "feed_forward": "gelu"}
    defaults = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    activations = {}
    aliases = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    allowed = {
        "no_bias": (True,),
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "embedding_fraction": (1.0,),
        "norm_type": ("low_precision_layernorm",),
        "learned_pos_emb": (True, False, None),
    }
    heads: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "alibi": (True,),
        "alibi_bias_max": (8,),
        "clip_qkv": (None,),
        "softmax_scale": (None,),
        "qk_ln": (False,),
    } | {"attn_type": ("multihead_attention",), "prefix_lm": (False,), "attn_uses_sequence_id": (False,)}
    reads = frozenset({"attn_config", "init_device", "emb_pdrop", "resid_pdrop"})
    mechanism = "attn-variants/alibi"
    layers = "transformer.blocks"
    names = {
        "embedding": "transformer.wte",
        "norm": "transformer.norm_f",
        "unembedding": "lm_head",
        "attention_norm": "norm_1",
        "attention.output": "attn.out_proj",
        "feed_forward_norm": "norm_2",
        "feed_forward.up": "ffn.up_proj",
        "feed_forward.down": "ffn.down_proj",
    }
    fused = {"attn.Wqkv": QKV}

    def own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The feed-forward width and the attention dropout; `attn_config` must request nothing but ALiBi."""
        attn_config = values.get("attn_config") or {}
        if not isinstance(attn_config, Mapping):
            raise InvalidValue.of("attn_config", attn_config, "an object")
        require_allowed(attn_config, self.heads)
        fields = {"attention_dropout": attn_config.get("attn_pdrop") or 0.0}
        return fields | {"intermediate_size": 4 * required_count(values, "d_model")}

    def own_keys(self, config: DecoderConfig) -> dict[str, Any]:
        """The dropout of attention weights."""
        return {"attn_config": {"attn_pdrop": config.attention_dropout} if config.attention_dropout else {}}
