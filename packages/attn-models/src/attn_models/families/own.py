"""Checkpoints of decoders of ours: every field of the config, and what must be installed to build it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName

from attn_models.decoder.config import AttentionChoice, DecoderConfig
from attn_models.families.deepseek_layout import CORRECTION
from attn_models.families.door import Door, Stored, needed

OURS = ("attn-core", "attn-models")


class OwnDoor(Door):
    """The layout in which our trained decoders are kept; tensors have the names of the parameters."""

    model_type = "attn_decoder"
    reads = frozenset({"decoder", "requires"})

    def configure(self, values: Mapping[str, Any]) -> DecoderConfig:
        """The decoder in `decoder`; a mechanism that is not installed is named with the package it came from."""
        fields = needed(values, "decoder")
        if not isinstance(fields, Mapping):
            raise InvalidValue.of("decoder", fields, "an object")
        config = DecoderConfig.from_plain(fields)
        for choice in _choices(config):
            require_installed(choice.mechanism, values.get("requires"))
        return config

    def describe(self, config: DecoderConfig) -> dict[str, Any]:
        """The config with mechanisms named in full, and the versions of the packages that build it."""
        registry = installed().mechanisms
        pattern = tuple(in_full(choice) for choice in config.pattern)
        full = dataclasses.replace(config, mechanism=registry.full_name(config.mechanism), pattern=pattern)
        owners = {registry.owner(choice.mechanism) for choice in _choices(config)}
        return {
            "architectures": ["AttnDecoder"],
            "model_type": self.model_type,
            "decoder": full.plain(),
            "requires": {name: version(name) for name in sorted(owners.union(OURS))},
        }

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """Every parameter under its own name; the biases of routers, which move by small rates, in float32."""
        return [Stored(name, (name,), exact=name.endswith(CORRECTION)) for name in parameters]


def _choices(config: DecoderConfig) -> list[AttentionChoice]:
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
