"""DeepSeek-V4 (DeepSeek-AI 2026): compressed attention, several residual streams, and experts of each token's id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import ModelFamily
from attn_core.checks import require_whole
from attn_core.errors import InvalidValue

from attn_sparse.streams import StreamConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(StreamConfig):
    """A decoder with several residual streams; in the first `num_hash_layers` layers the experts of a token depend on
    its id alone.
    """

    num_hash_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("num_hash_layers", self.num_hash_layers, ge=0, le=self.num_layers)
        if self.num_hash_layers and self.num_experts is None:
            raise InvalidValue.of("num_hash_layers", self.num_hash_layers, "0 in a model without experts")


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
