"""The options of `rwkv7`, and the config of an RWKV-7 decoder."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core import MechanismConfig
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig

LARGEST_CHUNK = 64
"""Within more tokens, the inverse of the fastest decay would leave the range of 32-bit numbers."""


@dataclass(frozen=True, kw_only=True)
class Rwkv7Config(MechanismConfig):
    """`decay_rank`, `rate_rank` and `gate_rank` are the inner sizes of the networks that compute decays, rates of
    learning and gates. `norm_eps` is that of the norm of a head; `chunk` only changes the speed.
    """

    decay_rank: int = checked(64, require_whole, ge=1)
    rate_rank: int = checked(64, require_whole, ge=1)
    gate_rank: int = checked(128, require_whole, ge=1)
    norm_eps: float = checked(64e-5, require_number, gt=0)
    chunk: int = checked(32, require_whole, ge=1, le=LARGEST_CHUNK, unit="tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_heads:
            raise InvalidValue.of("num_heads", self.num_heads, f"a divisor of hidden_size {self.hidden_size}")


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
