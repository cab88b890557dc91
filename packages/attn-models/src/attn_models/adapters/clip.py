"""CLIP checkpoints in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_schema.decoder import FeedForwardKind

from attn_models.adapters.base import ACTIVATIONS, EncoderAdapter, Layout, StoredTensor, require_allowed, required_count
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.encoder.config import ClipImageConfig, ClipTextConfig, ImageEncoderConfig

if TYPE_CHECKING:
    from attn_models.encoder.clip import ClipText

SHARED = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
}
TEXT = SHARED | {"vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings", "end_id": "eos_token_id"}
IMAGE = SHARED | {"image": "image_size", "patch": "patch_size", "channels": "num_channels"}
# A tower's config.json holds only the values that differ from these.
DEFAULTS: dict[str, Any] = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
TEXT_DEFAULTS = DEFAULTS | {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "eos_token_id": 49407,
}
IMAGE_DEFAULTS = DEFAULTS | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}
PROJECTION = 512
CLIP_ACTIVATIONS: dict[str, FeedForwardKind] = ACTIVATIONS | {"quick_gelu": "quick_gelu"}
HF_ACTIVATIONS = {ours: theirs for theirs, ours in reversed(CLIP_ACTIVATIONS.items())}
OF_TOWERS = {"projection_dim", "is_decoder", "add_cross_attention"}
KNOWN = frozenset(
    {
        "text_config",
        "vision_config",
        "text_config_dict",
        "vision_config_dict",
        "projection_dim",
        "logit_scale_init_value",
    }
)
OLD_END = 2
"""The `eos_token_id` of old config.json files, which is wrong: in those models the highest token id ends a text."""
BLOCK = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention_norm": "layer_norm1",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
    "feed_forward_norm": "layer_norm2",
}


def read_tower(values: Mapping[str, Any], key: str, defaults: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config of a tower, with defaults; raises `InvalidValue` for a key that would change what is computed."""
    require_allowed(values, {f"{key}_dict": (None,)})
    given = values.get(key)
    if not isinstance(given, Mapping):
        raise InvalidValue.of(key, given, "an object")
    found = {**defaults, **given}
    check_unread_keys(found, {*defaults, *OF_TOWERS}, path)
    heads = {"hidden_act": tuple(CLIP_ACTIVATIONS), "is_decoder": (False, None), "add_cross_attention": (False, None)}
    require_allowed(found, heads)
    return found


def size_of(values: Mapping[str, Any]) -> Any:
    """The size of the joint embedding vectors."""
    return values.get("projection_dim", PROJECTION)


class TextTowerAdapter(EncoderAdapter):
    """The text tower of checkpoints with two."""

    pooling = ("lasttoken",)
    outside: ClassVar[Mapping[str, str]] = {
        "embedding": "text_model.embeddings.token_embedding",
        "positions": "text_model.embeddings.position_embedding",
        "norm": "text_model.final_layer_norm",
    }

    def to_hf_config(self, config: Any) -> dict[str, Any]:
        """Raises `Incompatible`: a config.json describes both towers, see `clip_config`; only CLIP's are written."""
        raise Incompatible(f"{type(config).__name__} alone cannot be expressed in a {self.model_type} config.json")

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        return [
            StoredTensor(stored_name(name, self.outside, "text_model.encoder.layers"), (name,)) for name in parameters
        ]


class ClipAdapter(TextTowerAdapter):
    """CLIP's text tower (Radford et al. 2021, arXiv 2103.00020); `ClipImageLayout` reads the image tower."""

    model_type = "clip"
    known_keys = KNOWN
    derived_names = re.compile(r"^(vision_model|visual_projection)\.|position_ids$|^logit_scale$")
    outside: ClassVar[Mapping[str, str]] = {**TextTowerAdapter.outside, "projection": "text_projection"}

    def from_hf_config(self, values: Mapping[str, Any]) -> ClipTextConfig:
        """Build the text tower's config from a CLIPConfig."""
        tower = read_tower(values, "text_config", TEXT_DEFAULTS, Path("config.json"))
        end = tower["eos_token_id"]
        sizes = {ours: tower[theirs] for ours, theirs in TEXT.items()}
        return ClipTextConfig(
            **sizes | {"end_id": required_count(tower, "vocab_size") - 1 if end == OLD_END else end},
            size=size_of(values),
            feed_forward=CLIP_ACTIVATIONS[tower["hidden_act"]],
            norm_eps=tower["layer_norm_eps"],
        )

    def build(self, config: ClipTextConfig) -> ClipText:
        """Build a text tower with random weights."""
        from attn_models.encoder.clip import ClipText

        return ClipText(config)


class ClipImageLayout(Layout):
    """The image tower of CLIP checkpoints."""

    model_type = ClipAdapter.model_type
    similarity: ClassVar[tuple[str, ...]] = ("logit_scale",)
    """The tensors of one number that make scores of similarities."""
    derived_names = re.compile(r"^(text_model|text_projection)\.|position_ids$|^logit_scale$")
    outside: ClassVar[Mapping[str, str]] = {
        "patches": "vision_model.embeddings.patch_embedding",
        "positions": "vision_model.embeddings.position_embedding",
        "embedding_norm": "vision_model.pre_layrnorm",
        "norm": "vision_model.post_layernorm",
        "projection": "visual_projection",
    }

    def from_hf_config(self, values: Mapping[str, Any], path: Path) -> ImageEncoderConfig:
        """Build the image tower's config from a config.json; raises `CheckpointInvalid` naming `path` and the key."""
        try:
            return self.config_of(values, path)
        except InvalidValue as error:
            raise CheckpointInvalid.of(path, error.message) from error

    def config_of(self, values: Mapping[str, Any], path: Path) -> ImageEncoderConfig:
        """As `from_hf_config`, but raises `InvalidValue`, which names only the key."""
        check_unread_keys(values, KNOWN, path)
        tower = read_tower(values, "vision_config", IMAGE_DEFAULTS, path)
        return ClipImageConfig(
            **{ours: tower[theirs] for ours, theirs in IMAGE.items()},
            size=size_of(values),
            feed_forward=CLIP_ACTIVATIONS[tower["hidden_act"]],
            norm_eps=tower["layer_norm_eps"],
        )

    def layout(self, config: ImageEncoderConfig) -> ClipImageLayout:  # noqa: ARG002  (names of some depend on it)
        """The layout with the tensor names of this tower's checkpoints."""
        return self

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter."""
        begin = {"begin": "vision_model.embeddings.class_embedding"}
        layers = "vision_model.encoder.layers"
        return [
            StoredTensor(begin.get(name) or stored_name(name, self.outside, layers), (name,)) for name in parameters
        ]


def stored_name(ours: str, outside: Mapping[str, str], layers: str) -> str:
    """The checkpoint's name of a tower's parameter."""
    module, _, leaf = ours.rpartition(".")
    if module in outside:
        return f"{outside[module]}.{leaf}"
    _, layer, part = module.split(".", 2)
    return f"{layers}.{layer}.{BLOCK[part]}.{leaf}"


def clip_config(text: ClipTextConfig, image: ClipImageConfig) -> dict[str, Any]:
    """The CLIPConfig of two towers; raises `Incompatible` where the sizes of their vectors differ."""
    if text.size != image.size:
        raise Incompatible(
            f"vectors of {text.size} and {image.size} elements cannot be expressed in a clip config.json"
        )

    def tower(config: Any, names: Mapping[str, str]) -> dict[str, Any]:
        own = {theirs: getattr(config, ours) for ours, theirs in names.items()}
        return own | {"hidden_act": HF_ACTIVATIONS[config.feed_forward], "layer_norm_eps": config.norm_eps}

    return {
        "architectures": ["CLIPModel"],
        "model_type": ClipAdapter.model_type,
        "projection_dim": text.size,
        "text_config": tower(text, TEXT),
        "vision_config": tower(image, IMAGE),
    }
