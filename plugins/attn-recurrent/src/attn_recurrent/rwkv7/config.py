"""The config of an RWKV-7 decoder."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.checks import require_whole
from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Rwkv7ModelConfig(DecoderConfig):
    """A decoder whose layers of the mechanism `rwkv7`, but the first, mix the values of the first into their own, by a
    network of the inner size `value_rank`. Layers have no feed-forward: in checkpoints, every second one is one."""

    value_rank: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("value_rank", self.value_rank, ge=1)
        if self.feed_forward != "none":
            raise InvalidValue.of("feed_forward", self.feed_forward, "none, as rwkv7_channel is one")
        if self.num_nextn_predict_layers:
            allowed = "0, as layers read the values of the first"
            raise InvalidValue.of("num_nextn_predict_layers", self.num_nextn_predict_layers, allowed)
