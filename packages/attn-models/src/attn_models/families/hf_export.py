"""What a foreign config.json can say of a decoder's attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import AttentionSpec, Heads, Mask
from attn_core.errors import Incompatible

from attn_models.attention import layer_attentions
from attn_models.decoder.config import DecoderConfig
from attn_models.families.hf_config import Rope, rope_parameters


def require_fields(config: DecoderConfig, fields: Mapping[str, Any], layout: str) -> None:
    """Raises `Incompatible` for the first field of the config that differs from `fields`."""
    for name, value in fields.items():
        if getattr(config, name) != value:
            raise Incompatible(f"{name} {getattr(config, name)!r} cannot be said in a {layout} config.json")


def softmax_heads(config: DecoderConfig, mask: Mask, layout: str) -> Heads:
    """The heads of a decoder whose layers all compute plain softmax attention under `mask`.

    Decided by what the mechanisms say they compute, not by their names. Raises `Incompatible` for any other.
    """
    heads: list[Heads] = []
    for attention in layer_attentions(config):
        spec = attention.mechanism.spec(attention.config)
        if spec is None or spec != AttentionSpec(heads=spec.heads, mask=mask, rotary=config.rotary):
            name = attention.mechanism.name
            raise Incompatible(f"mechanism {name!r} cannot be said in a {layout} config.json", mechanism=name)
        heads.append(spec.heads)
    if any(other != heads[0] for other in heads) or heads[0].per_group is None:
        raise Incompatible(f"heads that differ between layers cannot be said in a {layout} config.json")
    return heads[0]


def common_hf_config(config: DecoderConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """The keys that Llama's config.json and those made after it have in common."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads or config.heads,
        "head_dim": config.head_size or config.width // config.heads,
        "intermediate_size": config.inner_width,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_dropout": config.attention_dropout,
    }


def hf_rope_parameters(config: DecoderConfig) -> dict[str, Any]:
    """The rotary positions that every layer is given, as version 5 says them."""
    return rope_parameters(
        Rope(base=config.rotary_base, fraction=config.rotary_fraction, scaling=config.rotary_scaling)
    )
