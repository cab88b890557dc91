"""Whisper checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import Incompatible

from attn_models.adapters.base import (
    ACTIVATIONS,
    HF_ACTIVATIONS,
    StateDictAdapter,
    StoredTensor,
    needed,
    require_allowed,
    required_count,
)
from attn_models.encoder_decoder.config import WhisperConfig

if TYPE_CHECKING:
    from attn_models.encoder_decoder.whisper import Whisper

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "num_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
    "num_mel_bins": "num_mel_bins",
    "max_encoder_len": "max_source_positions",
    "max_seq_len": "max_target_positions",
}
# Keys of the decoder that must equal the encoder's.
SAME = {"decoder_attention_heads": "encoder_attention_heads", "decoder_ffn_dim": "encoder_ffn_dim"}
# Keys for training, for another head, and for generation, whose settings are read from generation_config.json.
UNUSED = frozenset(
    {
        *("encoder_layerdrop", "decoder_layerdrop", "init_std", "use_weighted_layer_sum", "classifier_proj_size"),
        *("apply_spec_augment", "median_filter_width", "suppress_tokens", "begin_suppress_tokens", "max_length"),
        *("forced_decoder_ids", "tie_word_embeddings"),
        *(f"mask_{kind}_{what}" for kind in ("time", "feature") for what in ("prob", "length", "min_masks")),
    }
)
OUTSIDE = {
    "embedding": "decoder.embed_tokens",
    "positions": "decoder.embed_positions",
    "source_positions": "encoder.embed_positions",
    "convolution": "encoder.conv1",
    "halving": "encoder.conv2",
    "encoder_norm": "encoder.layer_norm",
    "decoder_norm": "decoder.layer_norm",
}
ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
PLACES = {
    "around_attention.norm": "self_attn_layer_norm",
    "around_cross.norm": "encoder_attn_layer_norm",
    "around_feed_forward.norm": "final_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
    **{f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in ATTENTION.items()},
    **{f"cross.{ours}": f"encoder_attn.{theirs}" for ours, theirs in ATTENTION.items()},
}
PREFIX = "model."


class WhisperAdapter(StateDictAdapter):
    """Whisper (Radford et al. 2022, arXiv 2212.04356).

    Its key projections have no biases: a key bias adds the same to all scores of a query, which does not change the
    softmax.
    """

    model_type = "whisper"
    Config = WhisperConfig
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_key_value_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    head = "proj_out.weight"
    zeros = unread = re.compile(r"\.key\.bias$")
    known_keys = frozenset({*SIZES.values(), *SAME, *UNUSED, "activation_function", "scale_embedding", "is_decoder"})

    def from_hf_config(self, values: Mapping[str, Any]) -> WhisperConfig:
        """Build the model's config from a WhisperConfig."""
        for name, other in SAME.items():
            require_allowed(values, {name: (values.get(other),)})
        activations = {"activation_function": tuple(ACTIVATIONS), "scale_embedding": (False,)}
        require_allowed(values, activations | {"is_decoder": (False, None)})
        for name in SAME:
            needed(values, name)
        sizes: dict[str, Any] = {ours: required_count(values, theirs) for ours, theirs in SIZES.items()}
        return WhisperConfig(**sizes, feed_forward=ACTIVATIONS[values.get("activation_function", "gelu")])

    def keys_of(self, config: WhisperConfig) -> dict[str, Any]:
        """The keys of a WhisperConfig, as transformers 5 reads it; raises `Incompatible` for what it cannot express."""
        names = (config.encoder, config.decoder, config.cross)
        plain = (WhisperConfig.encoder, WhisperConfig.decoder, WhisperConfig.cross)
        options = config.encoder_options or config.decoder_options or config.cross_options
        if names != plain or options:
            raise Incompatible(f"other mechanisms than {plain} cannot be expressed in a whisper config.json")
        sizes = {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
        sizes["decoder_layers"] = config.decoder_layers
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": self.model_type,
            **sizes,
            **{name: sizes[other] for name, other in SAME.items()},
            "activation_function": HF_ACTIVATIONS[config.feed_forward],
            # Null, because the defaults are ids of a vocabulary of 51,865.
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "begin_suppress_tokens")),
        }

    def build(self, config: WhisperConfig) -> Whisper:
        """Build a model with random weights."""
        from attn_models.encoder_decoder.whisper import Whisper

        return Whisper(config)

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names without the prefix to those in the checkpoint."""
        return {name.removeprefix(PREFIX): name for name in names}

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        return [StoredTensor(hf_name(name), (name,)) for name in parameters]


def hf_name(ours: str) -> str:
    """The checkpoint's name of a model parameter."""
    module, _, leaf = ours.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{leaf}"
    stack, layer, part = module.split(".", 2)
    return f"{stack}.layers.{layer}.{PLACES[part]}.{leaf}"
