"""SigLIP's towers and DINOv2 in the layout of Hugging Face's transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.errors import InvalidValue

from attn_models.adapters.base import ACTIVATIONS, StoredTensor, require_allowed, required_count
from attn_models.adapters.clip import CLIP_ACTIVATIONS, IMAGE, SHARED, ClipImageLayout, TextTowerAdapter, read_tower
from attn_models.adapters.hf_config import check_unread_keys
from attn_models.encoder.config import ImageEncoderConfig, SiglipTextConfig

if TYPE_CHECKING:
    from attn_models.encoder.clip import SiglipText

TEXT = SHARED | {"vocab_size": "vocab_size", "max_seq_len": "max_position_embeddings", "pad_id": "pad_token_id"}
SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
USUAL = SIZES | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
TEXT_DEFAULTS = USUAL | {"vocab_size": 32000, "max_position_embeddings": 64, "pad_token_id": 1, "projection_size": None}
IMAGE_DEFAULTS = USUAL | {"num_channels": 3, "image_size": 224, "patch_size": 16, "vision_use_head": True}
KNOWN = frozenset({"text_config", "vision_config", "initializer_factor"})
DERIVED = r"position_ids$|^logit_(scale|bias)$"


class SiglipAdapter(TextTowerAdapter):
    """SigLIP's text tower (Zhai et al. 2023, arXiv 2303.15343); `SiglipImageLayout` reads the image tower."""

    model_type = "siglip"
    known_keys = KNOWN
    derived_names = re.compile(rf"^vision_model\.|{DERIVED}")
    outside: ClassVar[Mapping[str, str]] = {**TextTowerAdapter.outside, "projection": "text_model.head"}

    def from_hf_config(self, values: Mapping[str, Any]) -> SiglipTextConfig:
        """Build the text tower's config from a SiglipConfig."""
        tower = read_tower(values, "text_config", TEXT_DEFAULTS, Path("config.json"))
        return SiglipTextConfig(
            **{ours: tower[theirs] for ours, theirs in TEXT.items()},
            size=tower["projection_size"] or tower["hidden_size"],
            feed_forward=CLIP_ACTIVATIONS[tower["hidden_act"]],
            norm_eps=tower["layer_norm_eps"],
        )

    def build(self, config: SiglipTextConfig) -> SiglipText:
        """Build a text tower with random weights."""
        from attn_models.encoder.clip import SiglipText

        return SiglipText(config)


class SiglipImageLayout(ClipImageLayout):
    """The image tower of SigLIP checkpoints."""

    model_type = SiglipAdapter.model_type
    similarity = ("logit_scale", "logit_bias")
    derived_names = re.compile(rf"^text_model\.|{DERIVED}")
    outside: ClassVar[Mapping[str, str]] = {
        "patches": "vision_model.embeddings.patch_embedding",
        "positions": "vision_model.embeddings.position_embedding",
        "norm": "vision_model.post_layernorm",
        "pool.attention.output": "vision_model.head.attention.out_proj",
        "pool.norm": "vision_model.head.layernorm",
        "pool.feed_forward.up": "vision_model.head.mlp.fc1",
        "pool.feed_forward.down": "vision_model.head.mlp.fc2",
    }

    def config_of(self, values: Mapping[str, Any], path: Path) -> ImageEncoderConfig:
        """See `ClipImageLayout`."""
        check_unread_keys(values, KNOWN, path)
        tower = read_tower(values, "vision_config", IMAGE_DEFAULTS, path)
        require_allowed(tower, {"vision_use_head": (True,)})
        return ImageEncoderConfig(
            **sizes_of(tower),
            class_token=False,
            feed_forward=CLIP_ACTIVATIONS[tower["hidden_act"]],
            norm_eps=tower["layer_norm_eps"],
        )

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, but one for the pool's queries, keys and values."""
        found = [StoredTensor("vision_model.head.probe", ("pool.query",))]
        for leaf, name in (("weight", "in_proj_weight"), ("bias", "in_proj_bias")):
            parts = tuple(f"pool.attention.{part}.{leaf}" for part in ("query", "key", "value"))
            found.append(StoredTensor(f"vision_model.head.attention.{name}", parts))
        joined = {part for stored in found for part in stored.parameters}
        return found + super().tensor_mappings([name for name in parameters if name not in joined])


DINO_DEFAULTS = IMAGE_DEFAULTS | {"patch_size": 14, "hidden_act": "gelu", "mlp_ratio": 4, "qkv_bias": True}
DINO_DEFAULTS |= {"use_swiglu_ffn": False}
DINO_UNUSED = frozenset(
    {"drop_path_rate", "layerscale_value", "apply_layernorm", "reshape_hidden_states", "use_mask_token", "stage_names"}
    | {"out_features", "out_indices", "attention_probs_dropout_prob", "hidden_dropout_prob", "initializer_range"}
)
"""Keys of training, of initial values, and of models that give the rows of some layers."""


class Dinov2Layout(ClipImageLayout):
    """DINOv2 (Oquab et al. 2023, arXiv 2304.07193): the vector of an image is the normalised output of its class
    token."""

    model_type = "dinov2"
    known_keys = frozenset({*DINO_DEFAULTS, *DINO_UNUSED} - {"intermediate_size", "vision_use_head"})
    similarity = ()
    shapes: Mapping[str, tuple[int, ...]]
    derived_names = re.compile(r"mask_token$|^classifier\.")
    outside: ClassVar[Mapping[str, str]] = {
        "patches": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
    }
    block: ClassVar[Mapping[str, str]] = {
        **{f"attention.{name}": f"attention.attention.{name}" for name in ("query", "key", "value")},
        "attention.output": "attention.output.dense",
        "attention_norm": "norm1",
        "feed_forward_norm": "norm2",
        "feed_forward.up": "mlp.fc1",
        "feed_forward.down": "mlp.fc2",
    }
    scales: ClassVar[Mapping[str, str]] = {"attention_scale": "layer_scale1", "feed_forward_scale": "layer_scale2"}

    def config_of(self, values: Mapping[str, Any], path: Path) -> ImageEncoderConfig:
        """See `ClipImageLayout`."""
        check_unread_keys(values, self.known_keys, path)
        values = {**DINO_DEFAULTS, **values}
        require_allowed(
            values, {"hidden_act": tuple(ACTIVATIONS), "qkv_bias": (True,), "use_swiglu_ffn": (True, False)}
        )
        ratio, width = values["mlp_ratio"], required_count(values, "hidden_size")
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or ratio <= 0:
            raise InvalidValue.of("mlp_ratio", ratio, "a number above 0")
        inner, gated = int(width * ratio), values["use_swiglu_ffn"]
        values["intermediate_size"] = (int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner
        return ImageEncoderConfig(
            **sizes_of(values),
            feed_forward="swiglu" if gated else ACTIVATIONS[values["hidden_act"]],
            norm_eps=values["layer_norm_eps"],
            layer_scale=True,
            interpolate=True,
        )

    def layout(self, config: ImageEncoderConfig) -> Dinov2Layout:
        """The layout with the shapes of this tower's tables."""
        found = Dinov2Layout()
        found.shapes = {"begin": (1, 1, config.hidden_size)}
        found.shapes["positions.weight"] = (1, config.sequence_length, config.hidden_size)
        return found

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """One tensor for each parameter, but one for gate and up projections."""
        gated = any(name.endswith("feed_forward.gate.weight") for name in parameters)
        return [stored for name in parameters for stored in self._stored(name, gated=gated)]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map the names without the prefix of a model with a classifier to those in the checkpoint."""
        return {name.removeprefix("dinov2."): name for name in names}

    def _stored(self, name: str, *, gated: bool) -> list[StoredTensor]:
        module, _, leaf = name.rpartition(".")
        if name in ("begin", "positions.weight"):
            theirs = "cls_token" if name == "begin" else "position_embeddings"
            return [StoredTensor(f"embeddings.{theirs}", (name,), shape=self.shapes[name])]
        if module in self.outside:
            return [StoredTensor(f"{self.outside[module]}.{leaf}", (name,))]
        _, layer, part = name.split(".", 2)
        place = f"encoder.layer.{layer}"
        if part in self.scales:
            return [StoredTensor(f"{place}.{self.scales[part]}.lambda1", (name,))]
        part = part.rpartition(".")[0]
        if gated and part == "feed_forward.up":
            return []
        if gated and part == "feed_forward.gate":
            return [StoredTensor(f"{place}.mlp.weights_in.{leaf}", (name, name.replace("gate", "up")))]
        own = "mlp.weights_out" if gated and part == "feed_forward.down" else self.block[part]
        return [StoredTensor(f"{place}.{own}.{leaf}", (name,))]


def sizes_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a tower; raises `InvalidValue` for one that is no whole number from 1."""
    return {ours: required_count(values, theirs) for ours, theirs in IMAGE.items()}


IMAGE_LAYOUTS: dict[str, ClipImageLayout] = {
    layout.model_type: layout for layout in (ClipImageLayout(), SiglipImageLayout(), Dinov2Layout())
}
"""The layouts of image towers by `model_type`."""
