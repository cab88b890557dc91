"""Mechanisms of attn as attention implementations of Hugging Face transformers."""

from __future__ import annotations

import dataclasses
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
from attn_core.errors import Incompatible, MissingPackage, UserError
from attn_core.kernels.attend import AttendKernel, attend_problem
from attn_core.kernels.dispatch import Operation
from attn_core.modifiers import SoftCap
from attn_core.scores import ScaledDot
from torch import Tensor

UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "cache")
"""Keyword arguments of some models that no mechanism supports: sink logits, position biases and caches."""

LARGEST_SEED = (1 << 63) - 1


class MechanismAttention:
    """`mechanism` with `options`, as a callable with the signature of a transformers attention implementation.

    The model computes projections and rotary positions; the mechanism defines score, mask, distribution and score
    modifiers. A query sees a key only if both the mechanism's mask and the model's allow it.
    """

    def __init__(self, mechanism: Mechanism, options: Mapping[str, Any]) -> None:
        self.mechanism = mechanism
        self.options = dict(options)
        self._spec = lru_cache(64)(self._spec_of)

    def check(self) -> None:
        """Raise `Incompatible` if the mechanism cannot be used as an attention implementation."""
        name = self.mechanism.name
        if not isinstance(self.mechanism, DeclaredMechanism) or self.mechanism.only_cross:
            raise Incompatible(f"mechanism {name!r} does not declare a self-attention computation", mechanism=name)
        if not self.mechanism.can(Capability.CAUSAL):
            raise Incompatible(f"mechanism {name!r} cannot be causal", mechanism=name)
        if not self.mechanism.can(Capability.ROTARY):
            message = f"mechanism {name!r} does not support rotary positions, which models apply before attention"
            raise Incompatible(message, mechanism=name)
        if type(self.mechanism).build is not DeclaredMechanism.build:
            message = f"mechanism {name!r} computes more than its score, mask and distribution, which is not supported"
            raise Incompatible(message, mechanism=name)
        shared = 2 if self.mechanism.can(Capability.GROUPED) else 4
        self._spec(Heads(query=4, key_value=shared, key_size=8, value_size=8), causal=True)

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
        window = kwargs.get("sliding_window")
        if not self.mechanism.can(Capability.GROUPED):
            repeats = query.shape[1] // key.shape[1]
            key, value = (rows.repeat_interleave(repeats, dim=1) for rows in (key, value))
        query_positions, key_positions, key_padding_mask = read_mask(attention_mask, causal=causal, window=window)
        heads = Heads(query=query.shape[1], key_value=key.shape[1], key_size=query.shape[3], value_size=value.shape[3])
        spec = _with_model_arguments(
            self._spec(heads, causal=causal), scaling, kwargs.get("softcap"), window if causal else None
        )
        if window is not None and query.shape[2] != key.shape[2] and not spec.relative:
            rule = "counts positions from the first token, which the cache of a sliding window no longer has"
            raise Incompatible(f"mechanism {self.mechanism.name!r} {rule}", mechanism=self.mechanism.name)
        operands = AttentionInputs(
            query=query.transpose(1, 2),
            key=key.transpose(1, 2),
            value=value.transpose(1, 2),
            query_positions=query_positions,
            key_positions=key_positions.expand(key.shape[0], -1),
            key_padding_mask=key_padding_mask,
            dropout=drawn_dropout(kwargs.get("dropout") or 0.0),
        )
        flags = torch.is_grad_enabled(), operands.dropout is not None
        kernel = _kernel(spec, query.dtype, query.device.type, flags)
        return kernel.run(spec, operands), None

    def _spec_of(self, heads: Heads, *, causal: bool) -> AttentionSpec:
        config = configure(
            self.mechanism,
            self.options,
            hidden_size=heads.query * heads.key_size,
            num_heads=heads.query,
            num_kv_heads=heads.key_value,
            head_dim=heads.key_size,
            causal=causal,
        )
        name = self.mechanism.name
        if config.dropout:
            raise Incompatible(f"mechanism {name!r} must not set dropout here: it is set by the model's config")
        spec = self.mechanism.spec(config)
        if spec is None or spec.weights or spec.norm is not None or self._has_inner(config):
            raise Incompatible(
                f"mechanism {name!r} has learned weights of its own, which the model does not have", mechanism=name
            )
        if spec.heads != heads:
            raise Incompatible(f"mechanism {name!r} does not have the heads of the model", mechanism=name)
        return dataclasses.replace(spec, rotary=None)

    def _has_inner(self, config: Any) -> bool:
        return isinstance(self.mechanism, DeclaredMechanism) and self.mechanism.inner(config) is not None


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
    from transformers.masking_utils import sdpa_mask

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

    A mechanism fits if it attends within one sequence, declares its computation as an `AttentionSpec`, and has no
    learned weights besides the projections, which are the model's. Raises `MissingPackage` without transformers.
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
    exist, `InvalidValue` for an option's bad value, `Incompatible` for a mechanism that does not fit, `MissingPackage`
    without transformers.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingPackage.of("transformers", "running mechanisms inside it") from error
    found: Mechanism = installed().mechanisms.get(mechanism)
    attention = MechanismAttention(found, options or {})
    attention.check()
    chosen = name or PREFIX + found.name
    if "/" in chosen or "|" in chosen or not chosen:
        raise Incompatible(f"{chosen!r} cannot name an implementation: transformers would look for it on its hub")
    AttentionInterface.register(chosen, attention)
    AttentionMaskInterface.register(chosen, materialised_mask)
    return chosen
