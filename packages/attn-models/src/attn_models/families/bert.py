"""BERT checkpoints, as Hugging Face's transformers keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attn_core import AttentionSpec, Full, Heads
from attn_core.errors import Incompatible

from attn_models.decoder.config import AttentionChoice
from attn_models.encoder.block import attention_of
from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.families.door import Stored, needed, refuse_others
from attn_models.families.encoder_door import ACTIVATIONS, THEIR_ACTIVATIONS, EncoderDoor

SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
}
OUTSIDE = {
    "embedding": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
}
BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
READS = frozenset(
    {
        *SIZES.values(),
        "max_position_embeddings",
        "type_vocab_size",
        "hidden_act",
        "layer_norm_eps",
        "position_embedding_type",
        "is_decoder",
        "add_cross_attention",
        "tie_word_embeddings",
    }
)


class BertDoor(EncoderDoor):
    """Post-norm blocks that see everything (Devlin et al. 2019, arXiv 1810.04805)."""

    model_type = "bert"
    prefix = "bert."
    architecture: ClassVar[str] = "BertModel"
    activation: ClassVar[str] = "gelu"
    reads = READS
    block: ClassVar[Mapping[str, str]] = BLOCK
    said: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": tuple(ACTIVATIONS),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False, None),
        "add_cross_attention": (False, None),
    }

    def configure(self, values: Mapping[str, Any]) -> EncoderConfig:
        """The encoder of a BertConfig."""
        refuse_others(values, self.said)
        sizes = {ours: needed(values, theirs) for ours, theirs in SIZES.items()}
        return EncoderConfig(
            **sizes,
            **self.places(values),
            pattern=self.attentions(values, sizes["layers"]),
            segments=values.get("type_vocab_size", 2),
            feed_forward=ACTIVATIONS[values.get("hidden_act", self.activation)],
            norm_eps=values.get("layer_norm_eps", 1e-12),
        )

    def describe(self, config: EncoderConfig) -> dict[str, Any]:
        """A config.json of this family."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            **self.described_places(config),
            **self.described_attentions(config),
            "type_vocab_size": config.segments,
            "hidden_act": THEIR_ACTIVATIONS[config.feed_forward],
            "layer_norm_eps": config.norm_eps,
        }

    def build(self, config: EncoderConfig) -> Encoder:
        """A fresh encoder."""
        return Encoder(config)

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """One tensor for each parameter."""
        return [Stored(self._their_name(name), (name,)) for name in parameters]

    def places(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """How the config numbers positions."""
        return {"context": needed(values, "max_position_embeddings")}

    def described_places(self, config: EncoderConfig) -> dict[str, Any]:
        """What their config.json says of `places`."""
        if config.positions != "every":
            raise Incompatible(f"positions {config.positions!r} cannot be said in a {self.model_type} config.json")
        return {"max_position_embeddings": config.context}

    def attentions(self, values: Mapping[str, Any], layers: int) -> tuple[AttentionChoice, ...]:  # noqa: ARG002
        """The mechanisms of the layers."""
        return (AttentionChoice(mechanism="mha"),)

    def described_attentions(self, config: EncoderConfig) -> dict[str, Any]:
        """What their config.json says of `attentions`: nothing, but raises `Incompatible` for others.

        Decided by what the mechanisms say they compute, not by their names.
        """
        size = config.width // config.heads
        plain = AttentionSpec(
            heads=Heads(query=config.heads, key_value=config.heads, key_size=size, value_size=size), mask=Full()
        )
        for layer in range(config.layers):
            attention = attention_of(config, layer)
            if attention.mechanism.spec(attention.config) != plain:
                self.refuse(attention.mechanism.name)
        return {}

    def refuse(self, mechanism: str) -> None:
        """Raises `Incompatible` for a mechanism that their config.json has no words for."""
        message = f"mechanism {mechanism!r} cannot be said in a {self.model_type} config.json"
        raise Incompatible(message, mechanism=mechanism)

    def _their_name(self, ours: str) -> str:
        module, _, leaf = ours.rpartition(".")
        if module in OUTSIDE:
            return f"{OUTSIDE[module]}.{leaf}"
        _, layer, part = module.split(".", 2)
        return f"encoder.layer.{layer}.{self.block[part]}.{leaf}"
