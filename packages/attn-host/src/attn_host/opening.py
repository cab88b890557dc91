"""The host that fits a model folder."""

from __future__ import annotations

from pathlib import Path

from attn_models.loading.encoders import is_encoder
from attn_schema import EngineConfig

from attn_host.encoder import EncoderHost
from attn_host.engine import EngineHost
from attn_host.host import Deliver, ModelHost


def open_host(folder: Path, config: EngineConfig, deliver: Deliver) -> ModelHost:
    """Load the model in `folder`: an encoder, or a model that generates; raises what loading raises."""
    return EncoderHost(folder, config) if is_encoder(folder) else EngineHost(folder, config, deliver)
