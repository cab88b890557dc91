"""Gemma 4 (Google 2026): windows and full layers with heads of two sizes, and embeddings for every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import ModelFamily

from attn_sparse.gemma4.config import Gemma4Config


class Gemma4Family(ModelFamily):
    """Gemma 4's text model, with random weights."""

    name = "gemma4"
    summary = "Gemma 4: embeddings for every layer, normed values, keys and values shared by the last layers (2026)."
    Config = Gemma4Config

    def configure(self, values: Mapping[str, Any]) -> Gemma4Config:
        """The config of plain values; every layer has the mechanism that they name, or `pattern`."""
        return Gemma4Config.from_plain(values)

    def build(self, config: Gemma4Config) -> Any:
        """A new `Gemma4Decoder`."""
        from attn_sparse.gemma4.model import Gemma4Decoder

        return Gemma4Decoder(config)
