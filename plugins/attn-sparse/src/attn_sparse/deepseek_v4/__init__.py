"""DeepSeek-V4 (DeepSeek-AI 2026): compressed attention, several residual streams, and experts of each token's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import ModelFamily

from attn_sparse.deepseek_v4.config import DeepseekV4Config


class DeepseekV4Family(ModelFamily):
    """DeepSeek-V4's model, with random weights."""

    name = "deepseek_v4"
    summary = "DeepSeek-V4: residual streams that every sublayer mixes, and limited feed-forwards or experts (2026)."
    Config = DeepseekV4Config

    def configure(self, values: Mapping[str, Any]) -> DeepseekV4Config:
        """The config of plain values; every layer has the mechanism that they name, or `pattern`."""
        return DeepseekV4Config.from_plain(values)

    def build(self, config: DeepseekV4Config) -> Any:
        """A new `DeepseekV4Decoder`."""
        from attn_sparse.deepseek_v4.model import DeepseekV4Decoder

        return DeepseekV4Decoder(config)
