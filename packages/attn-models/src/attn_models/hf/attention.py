"""Mechanisms of attn as attention implementations of Hugging Face transformers."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from attn_core import (
    AttentionInputs,
    AttentionSpec,
    Capability,
    DeclaredMechanism,
    Heads,
    Mechanism,
    Window,
    configure,
    installed,
)
from attn_core.dropout import Dropout
from attn_core.errors import Incompatible, InvalidValue, UserError
from attn_core.kernels.attend import AttendKernel, attend_problem
from attn_core.kernels.dispatch import Operation
from attn_core.modifiers import SoftCap
from attn_core.norms import QkL2Norm
from attn_core.scores import ScaledDot
from torch import Tensor
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.masking_utils import sdpa_mask

UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "cache")
"""Keyword arguments of some models that no mechanism supports: sink logits, position biases and caches."""

LARGEST_SEED = (1 << 63) - 1

SOME_HEADS = Heads(query=4, key_value=4, key_size=8, value_size=8)


class MechanismAttention:
    """`mechanism` with `options`, as a callable with the signature of a transformers attention implementation.

    The model computes projections and rotary positions; the mechanism defines score, mask, distribution and score
    modifiers. A query sees a key only if both the mechanism's mask and the model's allow it. What the mechanism learns
    is in `module.mechanism`, a `MechanismLayer` that a module gets when its model is built.
    """

    def __init__(self, mechanism: Mechanism, options: Mapping[str, Any]) -> None:
        self.mechanism = mechanism
        self.options = dict(options)
        self._shared = lru_cache(256)(self._shared_layer)

    def check(self) -> bool:
        """Whether the mechanism has learned weights besides the projections, which are the model's; raises
        `Incompatible` if it cannot be used as an attention implementation."""
        name = self.mechanism.name
        if not isinstance(self.mechanism, DeclaredMechanism) or self.mechanism.only_cross:
            raise Incompatible(f"mechanism {name!r} does not declare a self-attention computation", mechanism=name)
        if type(self.mechanism).build is not DeclaredMechanism.build:
            message = f"mechanism {name!r} computes more than its score, mask and distribution, which is not supported"
            raise Incompatible(message, mechanism=name)
        if not self.mechanism.can(Capability.ROTARY):
            message = f"mechanism {name!r} does not support rotary positions, which models apply before attention"
            raise Incompatible(message, mechanism=name)
        try:
            layer, learns = self._shared(SOME_HEADS, causal=self.mechanism.can(Capability.CAUSAL))
        except InvalidValue:  # a mechanism with one key/value head
            one = dataclasses.replace(SOME_HEADS, key_value=1)
            layer, learns = self._shared(one, causal=self.mechanism.can(Capability.CAUSAL))
        if layer.spec.norm is not None and not isinstance(layer.spec.norm, QkL2Norm):
            message = f"mechanism {name!r} normalises queries and keys before rotary positions, which the model applies"
            raise Incompatible(message, mechanism=name)
        if layer.inner is not None and layer.inner.reads_rows:
            message = f"mechanism {name!r} needs hidden states or a reward, and gets only queries, keys and values"
            raise Incompatible(message, mechanism=name)
        return learns

    def build(self, heads: Heads, *, causal: bool, index: int = 0) -> Any:
        """The mechanism's layer without projections for the attention module of this `index`, whose heads these are. A
        mechanism without grouped heads has its own number of key/value heads. Raises `Incompatible` for heads that the
        mechanism does not have, and the errors of its config.
        """
        grouped = self.mechanism.can(Capability.GROUPED)
        config = configure(
            self.mechanism,
            self.options,
            hidden_size=heads.query,
            num_heads=heads.query,
            num_kv_heads=heads.key_value if grouped else None,
            head_dim=heads.key_size,
            causal=causal,
            layer=index,
        )
        name = self.mechanism.name
        if config.dropout:
            raise Incompatible(f"mechanism {name!r} must not set dropout here: it is set by the model's config")
        layer = self.mechanism.build(config)
        if dataclasses.replace(layer.spec.heads, key_value=heads.key_value) != heads:
            raise Incompatible(f"mechanism {name!r} does not have the heads of the model", mechanism=name)
        layer.spec = dataclasses.replace(layer.spec, rotary=None)
        layer.leave_out_projections()
        return layer

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Outputs [batch, query, heads, value_size] of `query` [batch, heads, query, key_size], `key` and `value`
        [batch, key_value_heads, key, size], and None for the weights; raises `Incompatible` for arguments and masks
        that the mechanism does not support."""
        given = [name for name in UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
        if given:
            raise Incompatible(f"mechanism {self.mechanism.name!r} does not support the model's {', '.join(given)}")
        causal = bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
        window, name = kwargs.get("sliding_window"), self.mechanism.name
        query_positions, key_positions, key_padding_mask = read_mask(attention_mask, causal=causal, window=window)
        heads = Heads(query=query.shape[1], key_value=key.shape[1], key_size=query.shape[3], value_size=value.shape[3])
        layer = self._layer_of(module, heads, causal=causal)
        repeats, rest = divmod(layer.spec.heads.key_value, heads.key_value)
        if rest or not repeats:
            raise Incompatible(f"mechanism {name!r} does not have the heads of the model", mechanism=name)
        if repeats > 1:
            key, value = (rows.repeat_interleave(repeats, dim=1) for rows in (key, value))
        scaling = None if scaling == heads.key_size**-0.5 else scaling
        spec = _with_model_arguments(layer.spec, scaling, kwargs.get("softcap"), window if causal else None)
        if window is not None and query.shape[2] != key.shape[2] and not spec.relative:
            rule = "counts positions from the first token, which the cache of a sliding window no longer has"
            raise Incompatible(f"mechanism {name!r} {rule}", mechanism=name)
        operands = dataclasses.replace(
            layer.prepared(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
            query_positions=query_positions,
            key_positions=key_positions.expand(key.shape[0], -1),
            key_padding_mask=key_padding_mask,
            dropout=drawn_dropout(kwargs.get("dropout") or 0.0),
        )
        self._check_call(layer, spec, operands)
        flags = torch.is_grad_enabled(), operands.dropout is not None
        kernel = _kernel(spec, query.dtype, query.device.type, flags)
        if layer.inner is None:
            return kernel.run(spec, operands), None
        found = layer.inner(operands.query.flatten(-2), operands, partial(kernel.run, spec))
        return found.reshape(*operands.query.shape[:-1], heads.value_size), None

    def _shared_layer(self, heads: Heads, *, causal: bool, index: int = 0) -> tuple[Any, bool]:
        with torch.random.fork_rng(devices=[]):  # its weights are not used
            layer = self.build(heads, causal=causal, index=index)
        return layer, next(layer.parameters(), None) is not None

    def _layer_of(self, module: Any, heads: Heads, *, causal: bool) -> Any:
        """The layer with the module's learned weights, or one that all modules share if nothing is learned."""
        index = getattr(module, "layer_idx", None) or 0
        (shared, learns), name = self._shared(heads, causal=causal, index=index), self.mechanism.name
        if not learns:
            return shared
        own = getattr(module, "mechanism", None)
        if not isinstance(own, MechanismLayer) or LEARNING.get(own.implementation) is not self:
            how = "from_pretrained or from_config with its name as attn_implementation, which also load and save them"
            message = f"mechanism {name!r} has learned weights, which a model gets when it is built: call {how}"
            raise Incompatible(message, mechanism=name)
        if own.built_for != (heads, causal, index):
            raise Incompatible(f"mechanism {name!r} was built for other heads than the model's", mechanism=name)
        return own.layer

    def _check_call(self, layer: Any, spec: AttentionSpec, operands: AttentionInputs) -> None:
        """Raise `Incompatible` for what the inner module or padding in front would get wrong."""
        name, padding = self.mechanism.name, operands.key_padding_mask
        if layer.inner is not None and layer.inner.computes_itself and spec != layer.spec:
            message = f"mechanism {name!r} does not support the model's scale of scores, cap or window"
            raise Incompatible(message, mechanism=name)
        if operands.dropout is not None and not self.mechanism.drops_weights:
            raise Incompatible(f"mechanism {name!r} does not support the model's dropout of weights", mechanism=name)
        if self.mechanism.counts_from_start and padding is not None and not bool(padding[:, 0].all()):
            message = f"mechanism {name!r} counts from the first row: padding must come after the tokens"
            raise Incompatible(message, mechanism=name)


LEARNING: dict[str, MechanismAttention] = {}
"""The registered implementations that have learned weights."""


class MechanismLayer(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What a mechanism learns besides projections, as a part of an attention module of transformers.

    It is added to every module that asks for the implementation while its model is built, so that its weights are
    loaded, trained and saved as all others are; those that a checkpoint lacks get the mechanism's initial values.
    """

    config_class = PreTrainedConfig

    def __init__(self, config: Any, module: Any) -> None:
        super().__init__(config)
        self.implementation: str = config._attn_implementation  # noqa: SLF001 -- transformers has no other name for it
        self.built_for = heads_in(module), bool(module.is_causal), getattr(module, "layer_idx", None) or 0
        self.layer = self._built()

    def _built(self) -> Any:
        heads, causal, index = self.built_for
        return LEARNING[self.implementation].build(heads, causal=causal, index=index)

    def _init_weights(self, module: Any) -> None:
        if module is self:
            for parameter, first in zip(self.layer.parameters(), self._built().parameters(), strict=True):
                initialization.copy_(parameter, first)


def heads_in(module: Any) -> Heads:
    """The heads of an attention module of transformers."""
    config = module.config

    def found(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)

    query = found("num_heads", "num_attention_heads") or config.num_attention_heads
    size = found("head_dim", "attention_head_size") or config.hidden_size // query
    groups = found("num_key_value_groups") or 1
    return Heads(query=query, key_value=query // groups, key_size=size, value_size=size)


def add_layer(_parent: Any, _name: str, module: Any) -> None:
    """Give an attention module of transformers its `MechanismLayer`, if its model asks for one; torch calls this for
    each module that becomes a part of another one."""
    asked = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not isinstance(asked, str) or asked not in LEARNING:
        return
    attends = "get_interface" in inspect.unwrap(type(module).forward).__code__.co_names
    if attends and not hasattr(module, "mechanism"):
        module.mechanism = MechanismLayer(module.config, module)


def _with_model_arguments(
    spec: AttentionSpec, scaling: float | None, cap: float | None, window: int | None
) -> AttentionSpec:
    changes: dict[str, Any] = {}
    if scaling is not None and spec.score == ScaledDot():
        changes["score"] = ScaledDot(scale=scaling)
    if cap is not None:
        changes["modifiers"] = (*spec.modifiers, SoftCap(cap=cap))
    if window is not None:
        changes["mask"] = spec.mask & Window(left=window - 1)
    return dataclasses.replace(spec, **changes)


def drawn_dropout(probability: float) -> Dropout | None:
    """The dropout of one call, with a seed drawn from torch's generator; None for probability 0."""
    return Dropout(probability=probability, seed=int(torch.randint(LARGEST_SEED, ()))) if probability else None


@lru_cache(256)
def _kernel(spec: AttentionSpec, dtype: torch.dtype, device: str, flags: tuple[bool, bool]) -> AttendKernel:
    operation: Operation[AttendKernel] = Operation(installed().kernels, AttendKernel, partial(attend_problem, spec))
    return operation.require(
        dtype=dtype,
        device=device,
        gradients=flags[0],
        dropout=flags[1],
        padded=True,
        has_positions=True,
        kv_unordered=True,
        queries=0,
        keys=0,
    )


def materialised_mask(*arguments: Any, **words: Any) -> Tensor:
    """The mask [batch, 1, query, key], bool, True where a query sees a key; never None, even if all keys are seen."""
    mask: Any = sdpa_mask(*arguments, **words | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask  # type: ignore[no-any-return]


def read_mask(mask: Tensor | None, *, causal: bool, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The positions of queries [batch, query] and keys [batch, key] and the key padding mask [batch, key] of `mask`.

    Positions are counted without padding, wherever it is. `window` is the number of tokens that a query sees, itself
    included, if the model has one. Raises `Incompatible` for a mask that is not made of causality, window and padding,
    such as one of packed sequences, because ignoring it would give wrong results.
    """
    if mask is None:
        raise Incompatible(
            "transformers passed no mask; register with attn_models.hf, which also registers the mask function"
        )
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1:
        raise Incompatible(
            f"a mask of {mask.dtype} {list(mask.shape)} is not supported; needed: bool [batch, 1, query, key]"
        )
    visible = mask[:, 0]
    places = torch.arange(visible.shape[2], device=mask.device)
    key_padding_mask = visible.any(1)
    key_positions = (key_padding_mask.cumsum(-1) - 1).clamp(min=0)
    if causal:
        # The last key that a query sees is itself.
        own = torch.where(visible, places, 0).amax(-1)
        query_positions = key_positions.gather(1, own)
        allowed = key_padding_mask[:, None] & (places <= own[..., None])
        allowed = allowed & (places > own[..., None] - window) if window else allowed
    else:
        own = places[: visible.shape[1]].expand(visible.shape[0], -1)
        query_positions = key_positions.gather(1, own) if visible.shape[1] == visible.shape[2] else own
        allowed = key_padding_mask[:, None].expand_as(visible)
    # Padding queries may see no key, or too many; their outputs are not used.
    if not torch.equal(allowed & visible.any(-1, keepdim=True), visible):
        raise Incompatible(
            "the model's mask is not made of causality, a window and padding; mechanisms support no other masks"
        )
    return query_positions, key_positions, key_padding_mask


PREFIX = "attn:"


def register(prefix: str = PREFIX) -> list[str]:
    """Register every installed mechanism that fits, with its default options; returns names such as "attn:sparsemax".

    A mechanism fits if it attends within one sequence and declares a computation of rotated queries, keys and values.
    The weights of one that learns any are made with the model: see `MechanismLayer`.
    """
    names = []
    for name in installed().mechanisms.names():
        try:
            names.append(register_mechanism(name, name=f"{prefix}{name.rpartition('/')[2]}"))
        except UserError:
            continue
    return names


def register_mechanism(mechanism: str, options: Mapping[str, Any] | None = None, *, name: str | None = None) -> str:
    """Register one mechanism with these options as the attention implementation `name`, by default attn:MECHANISM.

    A mask function is registered under the same name: without one, transformers passes no mask, and causality and
    padding would be silently lost. Returns the name. Raises `UnknownName` for a mechanism or option that does not
    exist, `InvalidValue` for an option's bad value, `Incompatible` for a mechanism that does not fit.
    """
    found: Mechanism = installed().mechanisms.get(mechanism)
    attention = MechanismAttention(found, options or {})
    learns = attention.check()
    chosen = name or PREFIX + found.name
    if "/" in chosen or "|" in chosen or not chosen:
        raise Incompatible(f"{chosen!r} cannot name an implementation: transformers would look for it on its hub")
    LEARNING.pop(chosen, None)
    if learns:
        LEARNING[chosen] = attention
        _watch()
    AttentionInterface.register(chosen, attention)
    AttentionMaskInterface.register(chosen, materialised_mask)
    return chosen


@lru_cache(1)
def _watch() -> None:
    register_module_module_registration_hook(add_layer)
