"""Checkpoints in attn's own layout: every field of the config, and the packages that are needed to build the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName
from attn_schema.decoder import AttentionChoice, DecoderConfig

from attn_models.adapters.base import EncoderAdapter, StateDictAdapter, StoredTensor, needed
from attn_models.adapters.deepseek import CORRECTION
from attn_models.adapters.vit import VitAdapter, labels_of
from attn_models.encoder.config import EncoderConfig, EncoderShape, VisionConfig

if TYPE_CHECKING:
    from torch import Tensor

    from attn_models.encoder.encoder import Encoder

OURS = ("attn-core", "attn-models")

SOURCE, LANGUAGE = "attn_source_model", "attn_language_model"
LAYOUTS = {SOURCE: "AttnSourceModel", LANGUAGE: "AttnLanguageModel"}
"""`architectures` of config.json by `model_type`, for models of installed families with a source, and without one."""


Attending = TypeVar("Attending", DecoderConfig, EncoderConfig, VisionConfig)


class NativeAdapter(StateDictAdapter):
    """attn's own layout, for every decoder; tensors have the names of the parameters."""

    model_type = "attn_decoder"
    known_keys = frozenset({"decoder", "requires"})

    def from_hf_config(self, values: Mapping[str, Any]) -> DecoderConfig:
        """Read the decoder config from the key `decoder`; raises as `config_from_json`."""
        return config_from_json(values, "decoder", DecoderConfig)

    def keys_of(self, config: DecoderConfig) -> dict[str, Any]:
        """The config with full mechanism names, and the versions of the packages that build it."""
        return {"architectures": ["AttnDecoder"], "model_type": self.model_type, **config_to_json(config, "decoder")}

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """Every parameter under its own name; router biases, which training moves in small steps, stay in float32."""
        return [StoredTensor(name, (name,), float32=name.endswith(CORRECTION)) for name in parameters]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map names to the checkpoint's; a model that `attn_models.hf` saved has the prefix `model.`."""
        return {name.removeprefix("model."): name for name in names}


def config_from_json(values: Mapping[str, Any], place: str, kind: type[Attending]) -> Attending:
    """Read the config of this kind from `values[place]`.

    Raises `UnknownName` for a mechanism that is not installed, naming the package that it came from.
    """
    fields = needed(values, place)
    if not isinstance(fields, Mapping):
        raise InvalidValue.of(place, fields, "an object")
    config = kind.from_plain(fields)
    for choice in _choices(config):
        require_installed(choice.mechanism, values.get("requires"))
    return config


def config_to_json(config: DecoderConfig | EncoderShape, place: str) -> dict[str, Any]:
    """The config under `place`, with full mechanism names, and the versions of the packages that build it."""
    registry = installed().mechanisms
    pattern = tuple(in_full(choice) for choice in config.pattern)
    full = dataclasses.replace(config, mechanism=registry.full_name(config.mechanism), pattern=pattern)
    owners = {registry.owner(choice.mechanism) for choice in _choices(config)}
    return {place: full.plain(), "requires": {name: version(name) for name in sorted(owners.union(OURS))}}


def _choices(config: DecoderConfig | EncoderShape) -> list[AttentionChoice]:
    """The mechanisms that the layers use."""
    return list(config.pattern) or [config.choice(0)]


def in_full(choice: AttentionChoice) -> AttentionChoice:
    """The choice with the full name of its mechanism."""
    return dataclasses.replace(choice, mechanism=installed().mechanisms.full_name(choice.mechanism))


def require_installed(name: str, requires: Any) -> None:
    """Raise `UnknownName` for a mechanism that is not installed, naming its package from `requires`."""
    try:
        installed().mechanisms.full_name(name)
    except UnknownName as error:
        owner, _, short = name.rpartition("/")
        made_with = requires.get(owner) if isinstance(requires, Mapping) else None
        if not made_with:
            raise
        message = f"unknown mechanism {short!r}: the model was made with {owner} {made_with}; pip install {owner}"
        raise UnknownName(message, kind="mechanism", name=short, package=owner) from error


class NativeEncoderAdapter(EncoderAdapter):
    """attn's own layout, for every encoder; tensors have the names of the parameters."""

    model_type = "attn_encoder"
    known_keys = frozenset({"encoder", "requires"})

    def from_hf_config(self, values: Mapping[str, Any]) -> EncoderConfig:
        """Read the encoder config from the key `encoder`; raises as `config_from_json`."""
        return config_from_json(values, "encoder", EncoderConfig)

    def to_hf_config(self, config: EncoderConfig) -> dict[str, Any]:
        """The config with full mechanism names, and the versions of the packages that build it."""
        return {"architectures": ["AttnEncoder"], "model_type": self.model_type, **config_to_json(config, "encoder")}

    def build(self, config: EncoderConfig) -> Encoder:
        """Build an encoder with random weights."""
        from attn_models.encoder.encoder import Encoder

        return Encoder(config)

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """Every parameter under its own name."""
        return [StoredTensor(name, (name,)) for name in parameters]

    def canonical_names(self, names: Iterable[str]) -> dict[str, str]:
        """Map names to the checkpoint's; a model that `attn_models.hf` saved has the prefix `model.`."""
        return {name.removeprefix("model."): name for name in names}


class NativeVitAdapter(VitAdapter):
    """attn's own layout, for every vision Transformer; tensors have the names of the parameters."""

    model_type = "attn_vit"
    known_keys = frozenset({"vision", "requires"})

    def to_hf_config(self, config: VisionConfig, labels: Sequence[str]) -> dict[str, Any]:
        """The config with full mechanism names, and the versions of the packages that build it."""
        return {
            "architectures": ["AttnVisionTransformer"],
            "model_type": self.model_type,
            "id2label": {str(place): label for place, label in enumerate(labels)},
            **config_to_json(config, "vision"),
        }

    def config_of(self, values: Mapping[str, Any]) -> VisionConfig:
        """Read the config from the key `vision`; also raises `InvalidValue` unless each class has a label."""
        config = config_from_json(values, "vision", VisionConfig)
        if len(labels_of(values)) != config.classes:
            raise InvalidValue.of("id2label", values.get("id2label"), f"a name for each of {config.classes} classes")
        return config

    def tensor_mappings(self, parameters: Sequence[str]) -> list[StoredTensor]:
        """Every parameter under its own name."""
        return [StoredTensor(name, (name,)) for name in parameters]

    def add_prefix(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are: this layout has no prefix."""
        return dict(tensors)
