"""Models of other families than the decoder from folders and into folders."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from attn_core import installed
from attn_core.errors import CheckpointInvalid, InvalidValue

from attn_models.decoder.weightless import weightless
from attn_models.families.built import fill_constants, refuse_giants
from attn_models.families.door import needed
from attn_models.families.own import OwnDoor, require_installed
from attn_models.families.tensors import read_parameters
from attn_models.weights import CheckpointFolder

SOURCE, LANGUAGE = "attn_source_model", "attn_language_model"
LAYOUTS = {SOURCE: "AttnSourceModel", LANGUAGE: "AttnLanguageModel"}
"""The `model_type` of their config.json, of those that read a source and of those that do not, and its architecture."""

PLACES = ("mechanism", "encoder", "decoder", "cross")
"""Fields of a config that name mechanisms."""


def build_from(checkpoint: CheckpointFolder, dtype: torch.dtype) -> Any:
    """The model in a checkpoint folder; raises `CheckpointInvalid` naming what is damaged or does not fit."""
    path = checkpoint.path / "config.json"
    try:
        values, name = needed(checkpoint.config, "model"), needed(checkpoint.config, "family")
        if not isinstance(values, Mapping) or not isinstance(name, str):
            raise InvalidValue.of("model", values, "an object, with its family's name beside it")
        for place in PLACES:
            if isinstance(values.get(place), str):
                require_installed(values[place], checkpoint.config.get("requires"))
        family = installed().models.get(name)
        config = family.configure(values)
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error
    refuse_giants(checkpoint, config)
    with weightless():
        model = family.build(config)
    model.load_state_dict(read_parameters(checkpoint, OwnDoor(), model.state_dict(), dtype), assign=True)
    if any(buffer.is_meta for buffer in model.buffers()):
        fill_constants(model, family.build(config))
    return model


def described(model: Any) -> dict[str, Any]:
    """The config.json of a model: its family, its fields and the packages that build it."""
    registry, values = installed().mechanisms, model.config.plain()
    for place in PLACES:
        if place in values:
            values[place] = registry.full_name(values[place])
    owners = {registry.owner(values[place]) for place in PLACES if place in values}
    layout = SOURCE if hasattr(model, "source_context") else LANGUAGE
    return {
        "architectures": [LAYOUTS[layout]],
        "model_type": layout,
        "family": family_of(model.config),
        "model": values,
        "requires": {name: version(name) for name in sorted(owners | {"attn-core", "attn-models"})},
    }


def family_of(config: Any) -> str:
    """The name of the installed family whose config this is."""
    return next(item.name for item in installed().models if getattr(item, "Config", None) is type(config))
