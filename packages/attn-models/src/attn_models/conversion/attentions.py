"""What may be converted: layers of softmax attention that are data."""

from __future__ import annotations

from attn_core import AttentionSpec
from attn_core.errors import Incompatible

from attn_models.decoder.attention import layer_attentions
from attn_models.decoder.config import DecoderConfig

PROJECTIONS = ("key.weight", "key.bias", "value.weight", "value.bias")


def specs_of(config: DecoderConfig) -> list[AttentionSpec]:
    """The attention of every layer; raises `Incompatible` for one that has no keys and values per head."""
    specs = []
    for attention in layer_attentions(config):
        spec = attention.mechanism.spec(attention.config)
        if spec is None:
            name = attention.mechanism.name
            raise Incompatible(f"mechanism {name!r} has no heads of keys and values to convert", mechanism=name)
        specs.append(spec)
    return specs
