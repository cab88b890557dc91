"""Checkpoints of vision Transformers for classification, in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue

from attn_models.adapters.base import ACTIVATIONS, HF_ACTIVATIONS, Layout, StoredTensor, needed, require_allowed
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.encoder.config import VisionConfig

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "vit."
WHOLE = {"begin": "embeddings.cls_token", "positions": "embeddings.position_embeddings"}
OUTSIDE = {"patches": "embeddings.patch_embeddings.projection", "norm": "layernorm", "classifier": "classifier"}
BLOCK = {
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "layernorm_before",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "layernorm_after",
}
SIZES = {
    "image": "image_size",
    "patch": "patch_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}


class VitAdapter(Layout):
    """A vision Transformer with its classifier; a pooler is not read."""

    model_type = "vit"
    # The stride and the pooler keys belong to heads that are not read.
    known_keys = frozenset(
        {
            *SIZES.values(),
            "num_channels",
            "hidden_act",
            "layer_norm_eps",
            "qkv_bias",
            "encoder_stride",
            "pooler_act",
            "pooler_output_size",
            "is_decoder",
            "add_cross_attention",
        }
    )
    derived_names = re.compile(r"^pooler\.")

    def from_hf_config(self, values: Mapping[str, Any], path: Path) -> VisionConfig:
        """Build the config from a ViTConfig, with a warning for unknown keys.

        Raises `CheckpointInvalid` naming `path` and the key.
        """
        try:
            check_unread_keys(values, self.known_keys, path)
            return self.config_of(values)
        except InvalidValue as error:
            raise CheckpointInvalid.of(path, error.message) from error

    def to_hf_config(self, config: VisionConfig, labels: Sequence[str]) -> dict[str, Any]:
        """The config.json of a model; raises `Incompatible` for attention that the layout cannot express."""
        choices = config.pattern or (config.choice(0),)
        for choice in choices:
            if installed().mechanisms.full_name(choice.mechanism) != "attn-variants/mha" or choice.options:
                raise Incompatible(f"mechanism {choice.mechanism!r} cannot be expressed in a vit config.json")
        if config.head_dim not in (None, config.hidden_size // config.num_heads):
            raise Incompatible(f"heads of {config.head_dim} elements cannot be expressed in a vit config.json")
        return {
            "architectures": ["ViTForImageClassification"],
            "model_type": self.model_type,
            **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
            "num_channels": config.channels,
            "hidden_act": HF_ACTIVATIONS[config.feed_forward],
            "layer_norm_eps": config.norm_eps,
            "qkv_bias": True,
            "id2label": {str(place): label for place, label in enumerate(labels)},
            "label2id": {label: place for place, label in enumerate(labels)},
        }

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        return [StoredTensor(self.hf_name(name), (name,)) for name in parameters]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names without the prefix `vit.` to those in the checkpoint; the classifier's have none."""
        return {name.removeprefix(PREFIX): name for name in names}

    def add_prefix(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with the prefix that a checkpoint with a classifier has."""
        return {
            name if name.startswith("classifier.") else f"{PREFIX}{name}": tensor for name, tensor in tensors.items()
        }

    def hf_name(self, ours: str) -> str:
        """The checkpoint's name of a model parameter."""
        if ours in WHOLE:
            return WHOLE[ours]
        module, _, leaf = ours.rpartition(".")
        if module in OUTSIDE:
            return f"{OUTSIDE[module]}.{leaf}"
        _, layer, part = module.split(".", 2)
        return f"encoder.layer.{layer}.{BLOCK[part]}.{leaf}"

    def config_of(self, values: Mapping[str, Any]) -> VisionConfig:
        """As `from_hf_config`, but raises `InvalidValue`, which names only the key."""
        require_allowed(values, {"hidden_act": tuple(ACTIVATIONS), "qkv_bias": (True,), "is_decoder": (False,)})
        return VisionConfig(
            **{ours: needed(values, theirs) for ours, theirs in SIZES.items()},
            channels=values.get("num_channels", 3),
            classes=len(labels_of(values)),
            feed_forward=ACTIVATIONS[values.get("hidden_act", "gelu")],
            norm_eps=values.get("layer_norm_eps", 1e-12),
        )


def labels_of(values: Mapping[str, Any]) -> list[str]:
    """The labels of a config.json (`id2label`); two by default, as in transformers.

    Raises `InvalidValue` unless the keys are the class numbers 0, 1, 2, ...
    """
    given = values.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})
    places = [str(place) for place in range(len(given))] if isinstance(given, Mapping) else []
    if not places or set(given) != set(places):
        raise InvalidValue.of("id2label", given, "a name for each class, numbered from 0")
    return [str(given[place]) for place in places]
