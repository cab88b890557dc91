"""Checkpoints in our own layout: every field of the config, and what must be installed to build it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName
from torch import Tensor

from attn_models.adapters.base import EncoderAdapter, StateDictAdapter, Stored, needed
from attn_models.adapters.deepseek import CORRECTION
from attn_models.adapters.vit import VitAdapter, labels_of
from attn_models.decoder.config import AttentionChoice, DecoderConfig
from attn_models.encoder.config import EncoderConfig, EncoderShape, VisionConfig
from attn_models.encoder.encoder import Encoder

OURS = ("attn-core", "attn-models")


Attending = TypeVar("Attending", DecoderConfig, EncoderConfig, VisionConfig)


class NativeAdapter(StateDictAdapter):
    """The layout in which our trained decoders are kept; tensors have the names of the parameters."""

    model_type = "attn_decoder"
    reads = frozenset({"decoder", "requires"})

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder in `decoder`; a mechanism that is not installed is named with the package it came from."""
        return configured(values, "decoder", DecoderConfig)

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """The config with mechanisms named in full, and the versions of the packages that build it."""
        return {"architectures": ["AttnDecoder"], "model_type": self.model_type, **described(config, "decoder")}

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """Every parameter under its own name; the biases of routers, which move by small rates, in float32."""
        return [Stored(name, (name,), exact=name.endswith(CORRECTION)) for name in parameters]


def configured(values: Mapping[str, Any], place: str, kind: type[Attending]) -> Attending:
    """The config of this kind in `values[place]`; raises `UnknownName` for a mechanism that is not installed."""
    fields = needed(values, place)
    if not isinstance(fields, Mapping):
        raise InvalidValue.of(place, fields, "an object")
    config = kind.from_plain(fields)
    for choice in _choices(config):
        require_installed(choice.mechanism, values.get("requires"))
    return config


def described(config: DecoderConfig | EncoderShape, place: str) -> dict[str, Any]:
    """The config under `place`, with mechanisms named in full, and the versions of the packages that build it."""
    registry = installed().mechanisms
    pattern = tuple(in_full(choice) for choice in config.pattern)
    full = dataclasses.replace(config, mechanism=registry.full_name(config.mechanism), pattern=pattern)
    owners = {registry.owner(choice.mechanism) for choice in _choices(config)}
    return {place: full.plain(), "requires": {name: version(name) for name in sorted(owners.union(OURS))}}


def _choices(config: DecoderConfig | EncoderShape) -> list[AttentionChoice]:
    """The choices that layers really use."""
    return list(config.pattern) or [config.choice(0)]


def in_full(choice: AttentionChoice) -> AttentionChoice:
    """The choice with its mechanism named in full."""
    return dataclasses.replace(choice, mechanism=installed().mechanisms.full_name(choice.mechanism))


def require_installed(name: str, requires: Any) -> None:
    """Raises `UnknownName` for a mechanism that is not there, with the package that it came from in `requires`."""
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
    """The layout that has words for every mechanism; tensors have the names of the parameters."""

    model_type = "attn_encoder"
    reads = frozenset({"encoder", "requires"})

    def configure(self, values: Mapping[str, Any]) -> EncoderConfig:
        """The encoder in `encoder`; a mechanism that is not installed is named with the package it came from."""
        return configured(values, "encoder", EncoderConfig)

    def describe(self, config: EncoderConfig) -> dict[str, Any]:
        """The config with mechanisms named in full, and the versions of the packages that build it."""
        return {"architectures": ["AttnEncoder"], "model_type": self.model_type, **described(config, "encoder")}

    def build(self, config: EncoderConfig) -> Encoder:
        """A fresh encoder."""
        return Encoder(config)

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """Every parameter under its own name."""
        return [Stored(name, (name,)) for name in parameters]


class NativeVitAdapter(VitAdapter):
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
