"""Mechanisms by name for the places that a model with a source has, checked against what each place needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core import Capability, Source, configure, installed
from attn_core.errors import Incompatible

from attn_models.decoder.attention import LayerAttention


def cross_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """An attention to the source that can be computed token by token.

    Raises `UnknownName` for a mechanism or option that does not exist, `InvalidValue` for an option's bad value,
    `Incompatible` for a mechanism that does not attend to a source or remembers more than the source.
    """
    found = _chosen(name, options, {Capability.CROSS, Capability.INCREMENTAL}, "attention to a source", shared)
    if not all(isinstance(spec, Source) for spec in found.states.values()):
        raise Incompatible(f"mechanism {name!r} remembers more than the source", mechanism=name)
    return found


def stepped_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """The same where it is only ever computed token by token, in training too, so that no weights are dropped.

    Raises as `cross_attention`, and `Incompatible` for options that would drop some.
    """
    found = cross_attention(name, options, **shared)
    if found.config.dropout:
        message = f"mechanism {name!r} attends here step by step, where no weights are dropped"
        raise Incompatible(f"{message}: its dropout must be 0, not {found.config.dropout}", mechanism=name)
    return found


def encoder_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """A self-attention that sees both ways; raises as `cross_attention`."""
    return _own(name, options, {Capability.BIDIRECTIONAL, Capability.PADDING}, shared | {"causal": False})


def decoder_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """A causal self-attention; raises as `cross_attention`."""
    return _own(name, options, {Capability.CAUSAL}, shared | {"causal": True})


def _own(name: str, options: Mapping[str, Any], needs: set[Capability], shared: Mapping[str, Any]) -> LayerAttention:
    found = _chosen(name, options, needs, "self-attention here", shared)
    if found.mechanism.can(Capability.CROSS):
        raise Incompatible(f"mechanism {name!r} attends to a source, not to its own sequence", mechanism=name)
    return found


def _chosen(
    name: str, options: Mapping[str, Any], needs: set[Capability], place: str, shared: Mapping[str, Any]
) -> LayerAttention:
    registry = installed().mechanisms
    mechanism = registry.get(name)
    if not mechanism.can(*needs):
        able = sorted(other.name for other in registry if other.can(*needs))
        words = " and ".join(sorted(needs - mechanism.capabilities))
        raise Incompatible(f"mechanism {name!r} is not {words}, as {place} must be; these are: {', '.join(able)}")
    return LayerAttention(mechanism, configure(mechanism, options, **shared))
