"""DeBERTa-v2 and v3 checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import AttentionChoice

from attn_models.adapters.base import ACTIVATIONS, inexpressible, require_allowed, required_count
from attn_models.adapters.bert import BLOCK, OUTSIDE, READS, BertAdapter
from attn_models.encoder.config import EncoderConfig, attention_of

DISENTANGLED = "attn-variants/disentangled"
TERMS = {"query_positions": "c2p", "key_positions": "p2c"}
"""The options for products with positions, and their words in `pos_att_type`."""
CONV_ACTIVATIONS = {"tanh": "tanh", **ACTIVATIONS}
COUNTS = ("position_buckets", "max_relative_positions")
NEW_HEAD = "lm_predictions.lm_head"
"""The masked language model's head of v3; older checkpoints have BERT's."""


class DebertaV2Adapter(BertAdapter):
    """BERT with disentangled attention and, in v2, a convolution beside the first layer (He et al. 2020, arXiv
    2006.03654; v3: He et al. 2021, arXiv 2111.09543)."""

    model_type = "deberta-v2"
    prefix = "deberta."
    architecture = "DebertaV2Model"
    untyped = True
    head_names: ClassVar[Mapping[str, str]] = {}
    pooled_activation = "gelu"
    head_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"pooler_hidden_act": ("gelu",)}
    derived_names = re.compile(BertAdapter.derived_names.pattern + r"|^(lm|mask)_predictions\.|position_embeddings\.")
    outside = OUTSIDE | {
        "blocks.0.attention.vectors.table": "encoder.rel_embeddings",
        "blocks.0.attention.vectors.norm": "encoder.LayerNorm",
        "convolution.conv": "encoder.conv.conv",
        "convolution.norm": "encoder.conv.LayerNorm",
    }
    block = BLOCK | {
        **{f"attention.{name}": f"attention.self.{name}_proj" for name in ("query", "key", "value")},
        **{f"attention.position_{name}": f"attention.self.pos_{name}_proj" for name in ("query", "key")},
    }
    known_keys = (
        READS - {"position_embedding_type", "is_decoder", "add_cross_attention"}
        | {"relative_attention", "max_relative_positions", "position_buckets", "norm_rel_ebd", "share_att_key"}
        | {"pos_att_type", "position_biased_input", "attention_head_size", "embedding_size", "legacy"}
        | {"conv_kernel_size", "conv_groups", "conv_act"}
        | {"pooler_hidden_act", "pooler_hidden_size", "pooler_dropout", "cls_dropout"}
    )
    allowed_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "norm_rel_ebd": ("none", "layer_norm"),
        "conv_act": tuple(CONV_ACTIVATIONS),
    }

    def names_of_heads(self, stored: Collection[str]) -> Mapping[str, str]:
        """The names of v3's head of the masked language model where the checkpoint has one, whatever `legacy` says."""
        parts = {"transform.dense": "dense", "transform.LayerNorm": "LayerNorm", "bias": "bias"}
        new = {f"cls.predictions.{ours}": f"{NEW_HEAD}.{theirs}" for ours, theirs in parts.items()}
        return new if f"{NEW_HEAD}.bias" in stored else self.head_names

    def fields_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The token types, of which there are none by default, and the convolution."""
        width = required_count(values, "hidden_size")
        head = width // required_count(values, "num_attention_heads")
        require_allowed(values, {"embedding_size": (width,), "attention_head_size": (head, None)})
        return {
            "type_vocab_size": values.get("type_vocab_size", 0),
            "conv_kernel_size": values.get("conv_kernel_size", 0),
            "conv_groups": values.get("conv_groups", 1),
            "conv_act": CONV_ACTIVATIONS[values.get("conv_act", "tanh")],
            "norm_eps": values.get("layer_norm_eps", 1e-7),
        }

    def keys_of(self, config: EncoderConfig) -> dict[str, Any]:
        """The convolution."""
        act = next(theirs for theirs, ours in CONV_ACTIVATIONS.items() if ours == config.conv_act)
        return {name: getattr(config, name) for name in ("conv_kernel_size", "conv_groups")} | {"conv_act": act}

    def positions_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Positions are added to the inputs, too, unless `position_biased_input` is False."""
        biased = values.get("position_biased_input", True)
        return super().positions_of(values) | {"positions": "every" if biased else "none"}

    def hf_positions(self, config: EncoderConfig) -> dict[str, Any]:
        """Whether positions are added to the inputs."""
        if config.positions not in ("every", "none"):
            raise inexpressible({"positions": config.positions}, self.model_type)
        return {"max_position_embeddings": config.max_seq_len, "position_biased_input": config.positions == "every"}

    def attention_choices(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:
        """Disentangled attention in every layer, or full attention without `relative_attention`."""
        given = values.get("pos_att_type") or []
        terms = [term.strip() for term in given.lower().split("|")] if isinstance(given, str) else given
        relative = bool(values.get("relative_attention", False))
        known = isinstance(terms, list) and all(term in TERMS.values() for term in terms)
        if not known or bool(terms) != relative:
            allowed = "'p2c', 'c2p' or 'p2c|c2p' with relative_attention, none without"
            raise InvalidValue.of("pos_att_type", given, allowed)
        if not relative:
            return super().attention_choices(values, layers)
        buckets, longest = (required_count(values, key, -1, least=-1) for key in COUNTS)
        options = {
            "buckets": buckets if buckets > 0 else None,
            "max_distance": longest if longest > 0 else required_count(values, "max_position_embeddings"),
            **{option: term in terms for option, term in TERMS.items()},
            "separate": not values.get("share_att_key", False),
            "norm_eps": values.get("layer_norm_eps", 1e-7) if values.get("norm_rel_ebd") == "layer_norm" else None,
        }
        return (AttentionChoice(mechanism=DISENTANGLED, options=options),)

    def hf_attention(self, config: EncoderConfig) -> dict[str, Any]:
        """The keys of disentangled attention, whose options must be the same in every layer, or of full attention."""
        names = {installed().mechanisms.full_name(name) for name in config.mechanisms}
        if names != {DISENTANGLED}:
            return super().hf_attention(config)
        chosen: list[Any] = [replace(attention_of(config, layer).config, layer=0) for layer in range(config.num_layers)]
        own = chosen[0]
        if any(one != own for one in chosen) or own.norm_eps not in (None, config.norm_eps):
            message = "options of attention that differ between layers, and another norm_eps for positions"
            raise Incompatible(f"{message} cannot be expressed in a {self.model_type} config.json")
        return {
            "relative_attention": True,
            "pos_att_type": "|".join(term for option, term in TERMS.items() if getattr(own, option)),
            "max_relative_positions": own.max_distance,
            "position_buckets": own.buckets or -1,
            "norm_rel_ebd": "none" if own.norm_eps is None else "layer_norm",
            "share_att_key": not own.separate,
        }
