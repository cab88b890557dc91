"""GLM-5.3 (Z.ai 2026): Kimi Delta Attention, latent attention to pools of tokens, and several residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import ModelFamily

from attn_sparse.streams import StreamConfig


class Glm5NextFamily(ModelFamily):
    """GLM-5.3's model, with random weights."""

    name = "glm5_next"
    summary = "GLM-5.3: residual streams that every sublayer mixes, whose mean is read, and limited experts (2026)."
    Config = StreamConfig

    def configure(self, values: Mapping[str, Any]) -> StreamConfig:
        """The config of plain values; every layer has the mechanism that they name, or `pattern`."""
        return StreamConfig.from_plain(values)

    def build(self, config: StreamConfig) -> Any:
        """A new `StreamDecoder`."""
        from attn_sparse.streams.model import StreamDecoder

        return StreamDecoder(config)
