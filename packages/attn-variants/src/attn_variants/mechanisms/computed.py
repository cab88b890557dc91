"""Argument checks and cost terms that computed mechanisms share. Nothing here imports torch."""

from __future__ import annotations

from attn_core import Heads, MechanismConfig
from attn_core.errors import Incompatible, InvalidValue


def check_causal(config: MechanismConfig, mechanism: str) -> None:
    """Raise `InvalidValue` unless the config is causal."""
    if not config.causal:
        raise InvalidValue.of("causal", config.causal, f"True: mechanism {mechanism!r} is a recurrence over time")


def multi_heads(config: MechanismConfig, mechanism: str, *, rotary: bool = False) -> Heads:
    """The heads of a config in which every query head has a key and value head of its own.

    Raises `InvalidValue` where heads are to share keys and values, and `Incompatible` for rotary positions, unless
    `rotary` says that the mechanism takes them.
    """
    if config.key_value_heads not in {None, config.heads}:
        allowed = f"{config.heads}, as many as heads: heads of mechanism {mechanism!r} share no keys and values"
        raise InvalidValue.of("key_value_heads", config.key_value_heads, allowed)
    if config.rotary is not None and not rotary:
        message = f"mechanism {mechanism!r} takes no rotary positions; use a model with learned positions or none"
        raise Incompatible(message, mechanism=mechanism)
    return config.head_layout


def causal_heads(config: MechanismConfig, mechanism: str) -> Heads:
    """As `multi_heads`, of a mechanism that is causal only; raises `InvalidValue` where the config is not."""
    check_causal(config, mechanism)
    return multi_heads(config, mechanism)


def projection_weights(config: MechanismConfig, heads: Heads) -> int:
    """Elements of the weight matrices of the query, key, value and output projections; two FLOPs each per token."""
    return config.width * 2 * heads.query * (heads.key_size + heads.value_size)


def projection_biases(config: MechanismConfig, heads: Heads) -> int:
    """Elements of the biases of these projections, 0 without `bias`."""
    return heads.query * (2 * heads.key_size + heads.value_size) + config.width if config.bias else 0
