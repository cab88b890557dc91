"""Checkpoints of encoders of ours: every field of the config, and what must be installed to build it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from attn_core import installed
from attn_core.errors import InvalidValue

from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.families.door import Stored, needed
from attn_models.families.encoder_door import EncoderDoor
from attn_models.families.own import OURS, in_full, require_installed


class OwnEncoderDoor(EncoderDoor):
    """The layout that has words for every mechanism; tensors have the names of the parameters."""

    model_type = "attn_encoder"
    reads = frozenset({"encoder", "requires"})

    def configure(self, values: Mapping[str, Any]) -> EncoderConfig:
        """The encoder in `encoder`; a mechanism that is not installed is named with the package it came from."""
        fields = needed(values, "encoder")
        if not isinstance(fields, Mapping):
            raise InvalidValue.of("encoder", fields, "an object")
        config = EncoderConfig.from_plain(fields)
        for choice in config.pattern or [config.choice(0)]:
            require_installed(choice.mechanism, values.get("requires"))
        return config

    def describe(self, config: EncoderConfig) -> dict[str, Any]:
        """The config with mechanisms named in full, and the versions of the packages that build it."""
        registry = installed().mechanisms
        pattern = tuple(in_full(choice) for choice in config.pattern)
        full = dataclasses.replace(config, mechanism=registry.full_name(config.mechanism), pattern=pattern)
        owners = {registry.owner(choice.mechanism) for choice in config.pattern or [config.choice(0)]}
        return {
            "architectures": ["AttnEncoder"],
            "model_type": self.model_type,
            "encoder": full.plain(),
            "requires": {name: version(name) for name in sorted(owners.union(OURS))},
        }

    def build(self, config: EncoderConfig) -> Encoder:
        """A fresh encoder."""
        return Encoder(config)

    def stored(self, parameters: Sequence[str]) -> list[Stored]:
        """Every parameter under its own name."""
        return [Stored(name, (name,)) for name in parameters]
