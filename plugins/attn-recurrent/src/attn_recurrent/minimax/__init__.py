"""MiniMax-01 (MiniMax 2025, arXiv 2501.08313): lightning attention in most layers, and normed residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import ModelFamily

from attn_recurrent.minimax.config import MiniMaxConfig


class MiniMaxFamily(ModelFamily):
    """MiniMax-01, with random weights."""

    name = "minimax"
    summary = "MiniMax-01: lightning attention, and sublayers added to what they read (MiniMax 2025)."
    Config = MiniMaxConfig

    def configure(self, values: Mapping[str, Any]) -> MiniMaxConfig:
        """The config of plain values; every layer has the mechanism that they name, or `pattern`."""
        return MiniMaxConfig.from_plain(values)

    def build(self, config: MiniMaxConfig) -> Any:
        """A new `MiniMaxDecoder`."""
        from attn_recurrent.minimax.model import MiniMaxDecoder

        return MiniMaxDecoder(config)
