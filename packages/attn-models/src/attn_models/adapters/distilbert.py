"""DistilBERT checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from attn_models.adapters.base import ACTIVATIONS, HEADS, HF_ACTIVATIONS, inexpressible, needed, require_allowed
from attn_models.adapters.bert import OUTSIDE, BertAdapter, require_said
from attn_models.encoder.config import EncoderConfig

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "max_seq_len": "max_position_embeddings",
}
EPS = 1e-12
"""The eps of every norm, which is not a key of config.json."""


class DistilBertAdapter(BertAdapter):
    """BERT without token types and with half of its layers (Sanh et al. 2019, arXiv 1910.01108)."""

    model_type = "distilbert"
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    }
    keys = SIZES
    prefix = "distilbert."
    architecture = "DistilBertModel"
    # `sinusoidal_pos_embds` only sets how position tables are initialised: a checkpoint holds their values.
    known_keys = frozenset({*SIZES.values(), "activation", "sinusoidal_pos_embds", "tie_word_embeddings"})
    derived_names = re.compile(HEADS.pattern + r"|^(vocab_(transform|layer_norm|projector)|pre_classifier)\.")
    head_names: ClassVar[Mapping[str, str]] = {
        "cls.predictions.transform.dense": "vocab_transform",
        "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
        "cls.predictions.bias": "vocab_projector.bias",
        "pooler.dense": "pre_classifier",
    }
    pooled_activation = "relu"
    outside: ClassVar[Mapping[str, str]] = {name: place for name, place in OUTSIDE.items() if name != "segments"}
    layers = "transformer.layer"
    block: ClassVar[Mapping[str, str]] = {
        "attention.query": "attention.q_lin",
        "attention.key": "attention.k_lin",
        "attention.value": "attention.v_lin",
        "attention.output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "feed_forward.up": "ffn.lin1",
        "feed_forward.down": "ffn.lin2",
        "feed_forward_norm": "output_layer_norm",
    }

    def from_hf_config(self, values: Mapping[str, Any]) -> EncoderConfig:
        """Build the encoder config from a DistilBertConfig."""
        require_allowed(values, {"activation": tuple(ACTIVATIONS)})
        return EncoderConfig(
            **{ours: needed(values, theirs) for ours, theirs in SIZES.items()},
            type_vocab_size=0,
            feed_forward=ACTIVATIONS[values.get("activation", "gelu")],
            norm_eps=EPS,
        )

    def to_hf_config(self, config: EncoderConfig) -> dict[str, Any]:
        """The DistilBertConfig of an encoder; raises `Incompatible` for what it cannot express."""
        if config.feed_forward not in HF_ACTIVATIONS:
            raise inexpressible({"feed_forward": config.feed_forward}, self.model_type)
        values = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            **self.hf_positions(config),
            "activation": HF_ACTIVATIONS[config.feed_forward],
        }
        require_said(config, self.from_hf_config(values), self.model_type)
        return values
