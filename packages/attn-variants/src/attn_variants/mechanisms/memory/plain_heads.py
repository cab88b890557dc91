"""What mechanisms ask of the heads that share nothing and are not turned."""

from __future__ import annotations

from attn_core import Heads, MechanismConfig
from attn_core.errors import InvalidValue


def plain_heads(config: MechanismConfig, mechanism: str) -> Heads:
    """The heads of a config; raises `InvalidValue` where it is not causal, shares keys or has rotary positions."""
    if not config.causal:
        raise InvalidValue.of("causal", config.causal, f"True: mechanism {mechanism!r} reads what came before")
    if config.key_value_heads not in {None, config.heads}:
        allowed = f"{config.heads}, as many as heads: every head of mechanism {mechanism!r} has a memory of its own"
        raise InvalidValue.of("key_value_heads", config.key_value_heads, allowed)
    if config.rotary is not None:
        raise InvalidValue.of("rotary", config.rotary, f"None: mechanism {mechanism!r} has no keys to turn")
    return config.head_layout
