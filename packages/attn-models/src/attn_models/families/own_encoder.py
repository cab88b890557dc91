"""Checkpoints of encoders of ours: every field of the config, and what must be installed to build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attn_models.encoder.config import EncoderConfig
from attn_models.encoder.encoder import Encoder
from attn_models.families.door import Stored
from attn_models.families.encoder_door import EncoderDoor
from attn_models.families.own import configured, described


class OwnEncoderDoor(EncoderDoor):
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
