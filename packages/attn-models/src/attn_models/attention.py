"""Chooses the attention of each layer: a mechanism by name with its config, checked against the needs of the layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core import (
    Capability,
    DeclaredMechanism,
    Mechanism,
    MechanismConfig,
    Paged,
    Rotary,
    StateSpecs,
    configure,
    installed,
)
from attn_core.declared import PINNED
from attn_core.errors import Incompatible
from attn_core.plugins.registry import Registry
from attn_core.rotary import layer_rotary
from attn_schema.decoder import AttentionChoice, DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class LayerAttention:
    """A mechanism and the config with which one layer builds it."""

    mechanism: Mechanism
    config: MechanismConfig

    @property
    def full_name(self) -> str:
        """`distribution/name` of the mechanism."""
        return installed().mechanisms.name_of(self.mechanism)

    @property
    def shared_states(self) -> StateSpecs:
        """The states of the layer if it did not share keys and values: a sharing layer reads those of its source."""
        return self.mechanism.state(dataclasses.replace(self.config, shares_kv=False))

    @property
    def states(self) -> StateSpecs:
        """The states that the layer keeps between decoding steps."""
        return self.mechanism.state(self.config)


def share_weights(chosen: Iterable[LayerAttention], layers: Iterable[Any]) -> None:
    """Tie weights between the built attention `layers` of a model, given in order, where their mechanism does so."""
    by_name: dict[str, list[tuple[LayerAttention, Any]]] = {}
    for attention, layer in zip(chosen, layers, strict=True):
        by_name.setdefault(attention.mechanism.name, []).append((attention, layer))
    for group in by_name.values():
        group[0][0].mechanism.share_weights([(attention.config, layer) for attention, layer in group])


def share_biases(layers: Sequence[Any]) -> None:
    """Share the learned biases of the first layer's scores with all others."""
    for layer in layers[1:]:
        layer.modifiers = layers[0].modifiers


def layer_attentions(config: DecoderConfig) -> list[LayerAttention]:
    """The attention of every layer, in order.

    Raises `UnknownName` for a mechanism or option that does not exist, `InvalidValue` for an option's bad value, and
    `Incompatible` for a mechanism that cannot be causal, that does not support rotary positions although the config
    sets them (the option `rotary` None leaves them out of a layer), that needs one key/value head per query head
    although the config has fewer, that cannot use the keys and values of the layer it shares them with, or that has no
    attention weights for `attention_dropout` to drop.
    """
    registry = installed().mechanisms
    attentions: list[LayerAttention] = []
    # Layers with the same choice share one config, so that each distinct choice is checked only once.
    known: list[tuple[AttentionChoice, bool, LayerAttention]] = []
    for layer in range(config.num_layers):
        choice, source_layer = config.choice(layer), config.source_layer(layer)
        found = next((made for seen, shared, made in known if (seen, shared) == (choice, source_layer < layer)), None)
        if found is None:
            found = _layer_attention(config, choice, registry, shares_kv=source_layer < layer)
            known.append((choice, source_layer < layer, found))
        if source_layer < layer:
            require_shareable(layer, found, source_layer, attentions[source_layer])
        attentions.append(found)
    return attentions


def _layer_attention(
    config: DecoderConfig, choice: AttentionChoice, registry: Registry[Mechanism], *, shares_kv: bool
) -> LayerAttention:
    mechanism = registry.get(choice.mechanism)
    _require(mechanism, _needs(config, choice), registry)
    options = dict(choice.options)
    if options.get("rotary") is not None:
        options["rotary"] = layer_rotary(config.rotary, options["rotary"])
    mechanism_config = configure(
        mechanism,
        options,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        causal=True,
        cross=False,
        bias=config.has_bias("attention_bias"),
        output_bias=config.has_bias("attention_output_bias"),
        rotary=config.rotary,
        max_seq_len=config.max_seq_len,
        shares_kv=shares_kv,
        dropout=config.attention_dropout,
    )
    return LayerAttention(mechanism, mechanism_config)


USUAL = ("mha", "gqa")
"""The mechanisms that errors name first, as the middle of a long message is cut out on its way to a client."""


def _needs(config: DecoderConfig, choice: AttentionChoice) -> dict[Capability, str]:
    needs = {Capability.CAUSAL: "cannot be causal, which a decoder needs"}
    if config.positions == "rotary" and choice.has_rotary:
        needs[Capability.ROTARY] = (
            "takes no rotary positions (positions can also be learned, sinusoidal or none; "
            "the option rotary=null leaves them out of a layer)"
        )
    shared = choice.options.get("num_kv_heads", config.num_kv_heads)
    if shared not in (None, config.num_heads):
        needs[Capability.GROUPED] = f"needs {config.num_heads} key/value heads, one for each query head, not {shared}"
    return needs


def _require(mechanism: Mechanism, needs: dict[Capability, str], registry: Iterable[Mechanism]) -> None:
    complaints = [complaint for capability, complaint in needs.items() if not mechanism.can(capability)]
    if not complaints:
        return
    able = those_that_can(item.name for item in registry if item.can(*needs))
    message = f"mechanism {mechanism.name!r} {', and '.join(complaints)}; these can: {able}"
    raise Incompatible(message, mechanism=mechanism.name)


def those_that_can(names: Iterable[str]) -> str:
    """Mechanisms for an error, the usual ones first."""
    return ", ".join(sorted(names, key=lambda name: (name not in USUAL, name))) or "none installed"


def require_shareable(layer: int, sharing_layer: LayerAttention, source_layer: int, source: LayerAttention) -> None:
    """Raise `Incompatible` unless the state of layer `source_layer` holds everything that layer `layer` has to read."""
    mine, theirs = sharing_layer.mechanism, source.mechanism
    prefix = f"layer {layer}, {mine.name!r}, cannot share keys and values of layer {source_layer}, {theirs.name!r}"
    if not theirs.can(Capability.SHARES_KV):
        raise Incompatible(f"{prefix}, which does not support sharing", mechanism=theirs.name)
    needed, given = _without_pins(sharing_layer, source), source.shared_states
    if PINNED in needed and _pinned(sharing_layer) != _pinned(source):
        raise Incompatible(f"{prefix}, which keeps other tokens in addition to its window", mechanism=mine.name)
    given = {name: spec for name, spec in given.items() if name in needed or name != PINNED}
    if {name: dict(spec.fields) for name, spec in needed.items()} != {n: dict(s.fields) for n, s in given.items()}:
        raise Incompatible(f"{prefix}: their keys and values differ in shape", mechanism=mine.name)
    for name, spec in needed.items():
        own, other = getattr(spec, "window", None), getattr(given[name], "window", None)
        if other is not None and (own is None or own > other):
            reach = "all tokens" if own is None else f"{own} tokens"
            raise Incompatible(
                f"{prefix}, which keeps {other} tokens: layer {layer} attends to {reach}", mechanism=mine.name
            )
    if _rotary(sharing_layer) != _rotary(source):
        raise Incompatible(f"{prefix}: their rotary positions differ", mechanism=mine.name)


def _without_pins(sharing_layer: LayerAttention, source: LayerAttention) -> StateSpecs:
    """The states that the sharing layer needs, without its pinned tokens if the source layer keeps all tokens."""
    needed, rows = sharing_layer.shared_states, source.shared_states.get("kv")
    everything = isinstance(rows, Paged) and rows.window is None
    if not everything or PINNED not in needed:
        return needed
    return {name: spec for name, spec in needed.items() if name != PINNED}


def _pinned(attention: LayerAttention) -> tuple[int, ...]:
    """The positions of the tokens that a layer keeps permanently, in addition to its window of recent tokens."""
    mechanism = attention.mechanism
    return mechanism.kept(attention.config).positions if isinstance(mechanism, DeclaredMechanism) else ()


def _rotary(attention: LayerAttention) -> Rotary | None:
    spec = attention.mechanism.spec(attention.config)
    return None if spec is None else spec.rotary


def cross_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """A cross-attention that can be computed token by token; it may keep other states besides those of the source.

    Raises `UnknownName` for a mechanism or option that does not exist, `InvalidValue` for an option's bad value,
    `Incompatible` for a mechanism that does not support incremental cross-attention.
    """
    own = shared | {"cross": True, "causal": False}
    return _chosen(name, options, {Capability.CROSS, Capability.INCREMENTAL}, "cross-attention", own)


def stepped_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """A cross-attention that is computed token by token in training too, where attention dropout is not supported.

    Raises the errors of `cross_attention`, and `Incompatible` for a non-zero dropout or a `Paged` state (one row per
    token of the target sequence), because a step of several tokens would write all of their rows at once.
    """
    found = cross_attention(name, options, **shared)
    own = found.mechanism.name
    paged = [state for state, spec in found.states.items() if isinstance(spec, Paged)]
    if paged:
        message = (
            f"mechanism {own!r} is computed token by token here, which does not work with its Paged state {paged[0]!r}"
        )
        raise Incompatible(f"{message}: its states must be Source or Slot", mechanism=own)
    if found.config.dropout:
        message = f"mechanism {own!r} is computed step by step here, where attention dropout is not supported"
        raise Incompatible(f"{message}: its dropout must be 0, not {found.config.dropout}", mechanism=own)
    return found


def encoder_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """A bidirectional self-attention that supports padding; raises the same errors as `cross_attention`."""
    return _own(name, options, {Capability.BIDIRECTIONAL, Capability.PADDING}, shared | {"causal": False})


def decoder_attention(name: str, options: Mapping[str, Any], **shared: Any) -> LayerAttention:
    """A causal self-attention; raises the same errors as `cross_attention`."""
    return _own(name, options, {Capability.CAUSAL}, shared | {"causal": True})


def _own(name: str, options: Mapping[str, Any], needs: set[Capability], shared: Mapping[str, Any]) -> LayerAttention:
    return _chosen(name, options, needs, "self-attention here", {**shared, "cross": False})


def _chosen(
    name: str, options: Mapping[str, Any], needs: set[Capability], place: str, shared: Mapping[str, Any]
) -> LayerAttention:
    registry = installed().mechanisms
    mechanism = registry.get(name)
    if not mechanism.can(*needs):
        able = sorted(other.name for other in registry if other.can(*needs))
        words = " and ".join(sorted(needs - mechanism.capabilities))
        message = f"mechanism {mechanism.name!r} is not {words}, as {place} must be; these are: {', '.join(able)}"
        raise Incompatible(message, mechanism=mechanism.name)
    return LayerAttention(mechanism, configure(mechanism, options, **shared))


@contextmanager
def recorded_weights(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context that records the weights [batch, heads, query, key] of every attention layer, in order of computation.

    Attention layers are the submodules with the name `attention`. Raises `Incompatible` in the model's forward pass if
    a mechanism has no weights.
    """
    maps: list[Tensor] = []

    def keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not hasattr(layer, "weights"):
            raise Incompatible(f"{type(layer).__name__} has no attention weights")
        maps.append(layer.weights(*args, **kwargs).detach())

    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "attention"]
    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()
