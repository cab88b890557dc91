"""Checkpoints of vision Transformers of ours: every field of the config, and what must be installed to build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attn_core.errors import Incompatible, InvalidValue, UnknownName
from torch import Tensor

from attn_models.families.door import Stored
from attn_models.families.own import configured, described
from attn_models.families.vit import VitLayout, labels_of
from attn_models.vision.config import VisionConfig


class OwnVitLayout(VitLayout):
    """The layout that has words for every mechanism; tensors have the names of the parameters."""

    model_type = "attn_vit"
    reads = frozenset({"vision", "requires"})

    def describe(self, config: VisionConfig, labels: Sequence[str]) -> dict[str, Any]:
        """The config with mechanisms named in full, and the versions of the packages that build it."""
        return {
            "architectures": ["AttnVisionTransformer"],
            "model_type": self.model_type,
            "id2label": {str(place): label for place, label in enumerate(labels)},
            **described(config, "vision"),
        }

    def configured(self, values: Mapping[str, Any]) -> VisionConfig:
        """The model in `vision`; a mechanism that is not installed is named with the package it came from."""
        config = configured(values, "vision", VisionConfig)
        if len(labels_of(values)) != config.classes:
            raise InvalidValue.of("id2label", values.get("id2label"), f"a name for each of {config.classes} classes")
        return config

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """Every parameter under its own name."""
        return [Stored(name, (name,)) for name in parameters]

    def headed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same."""
        return dict(tensors)


VIT_LAYOUTS: dict[str, VitLayout] = {layout.model_type: layout for layout in (VitLayout(), OwnVitLayout())}


def vit_layout_of(model_type: object) -> VitLayout:
    """The layout of this `model_type`; raises `UnknownName` with those that exist."""
    if not isinstance(model_type, str) or model_type not in VIT_LAYOUTS:
        raise UnknownName.of("model_type of a model of images", str(model_type), VIT_LAYOUTS)
    return VIT_LAYOUTS[model_type]


def layout_for(config: VisionConfig) -> VitLayout:
    """transformers' layout where it can say the model, else ours."""
    try:
        VIT_LAYOUTS[VitLayout.model_type].describe(config, ())
    except Incompatible:
        return VIT_LAYOUTS[OwnVitLayout.model_type]
    return VIT_LAYOUTS[VitLayout.model_type]
