"""BERT checkpoints, as Hugging Face's transformers keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid, InvalidValue, UnknownName

from attn_models.encoder.config import EncoderConfig
from attn_models.families.door import Layout, Stored, needed, refuse_others

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
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
PREFIX = "bert."


class BertLayout(Layout):
    """The encoder alone; the pooler and the heads of pre-training are left where they are."""

    model_type = "bert"
    derived = re.compile(r"^(pooler\.|cls\.)|position_ids$")

    def configure(self, values: Mapping[str, Any], path: Path) -> EncoderConfig:
        """The encoder of a BertConfig; raises `CheckpointInvalid` naming `path` and the key."""
        if values.get("model_type") != self.model_type:
            raise UnknownName.of("model_type of an encoder", str(values.get("model_type")), [self.model_type])
        try:
            return self._configured(values)
        except InvalidValue as error:
            raise CheckpointInvalid.of(path, error.message) from error

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """One tensor for each parameter."""
        return [Stored(self._their_name(name), (name,)) for name in parameters]

    def canonical(self, names: Iterable[str]) -> dict[str, str]:
        """Names begin with `bert.` where the model was saved with a head."""
        return {name.removeprefix(PREFIX): name for name in names}

    def _their_name(self, ours: str) -> str:
        module, _, leaf = ours.rpartition(".")
        if module in OUTSIDE:
            return f"{OUTSIDE[module]}.{leaf}"
        _, layer, part = module.split(".", 2)
        return f"encoder.layer.{layer}.{BLOCK[part]}.{leaf}"

    def _configured(self, values: Mapping[str, Any]) -> EncoderConfig:
        refuse_others(
            values,
            {
                "hidden_act": tuple(ACTIVATIONS),
                "position_embedding_type": ("absolute", None),
                "is_decoder": (False, None),
                "add_cross_attention": (False, None),
            },
        )
        return EncoderConfig(
            vocabulary=needed(values, "vocab_size"),
            context=needed(values, "max_position_embeddings"),
            width=needed(values, "hidden_size"),
            layers=needed(values, "num_hidden_layers"),
            heads=needed(values, "num_attention_heads"),
            hidden=needed(values, "intermediate_size"),
            segments=values.get("type_vocab_size", 2),
            feed_forward=ACTIVATIONS[values.get("hidden_act", "gelu")],
            norm_eps=values.get("layer_norm_eps", 1e-12),
        )
