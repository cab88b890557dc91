"""What holds a model, by its kind."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from attn_models.loading.encoders import is_encoder

from attn_serve.encoder_host import EncoderHost
from attn_serve.host import Deliver, EngineHost
from attn_serve.requests import EngineSettings

Host: TypeAlias = EngineHost | EncoderHost
"""What holds a model; both answer the same calls, each refusing those that its models cannot do."""


def open_host(folder: Path, settings: EngineSettings, deliver: Deliver) -> Host:
    """Load the model in `folder`, an encoder or one that writes; raises what loading raises."""
    if is_encoder(folder):
        return EncoderHost(folder, settings)
    return EngineHost(folder, settings, deliver)
