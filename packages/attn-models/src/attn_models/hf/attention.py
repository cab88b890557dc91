"""A mechanism as a function that transformers calls between a model's projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from attn_core import (
    AttentionSpec,
    Capability,
    DeclaredMechanism,
    Heads,
    Kernel,
    Mechanism,
    Operands,
    Window,
    configure,
    installed,
)
from attn_core.dropout import Dropout
from attn_core.errors import Incompatible
from attn_core.kernels.attend import attend_problem
from attn_core.kernels.dispatch import choose
from attn_core.modifiers import SoftCap
from attn_core.scores import ScaledDot
from torch import Tensor

from attn_models.hf.masks import read_mask

REFUSED = ("s_aux", "position_bias", "cache")
"""What models may pass on that a mechanism would have to compute."""

SEEDS = (1 << 63) - 1


class MechanismAttention:
    """`mechanism` with `options`, called as an attention implementation is.

    Projections and rotary positions are the model's; score, mask, distribution and score modifiers the mechanism's.
    Its mask and the model's both hold.
    """

    def __init__(self, mechanism: Mechanism, options: Mapping[str, Any]) -> None:
        self.mechanism = mechanism
        self.options = dict(options)
        self._spec = lru_cache(64)(self._spec_of)

    def check(self) -> None:
        """Raises `Incompatible` where the mechanism does not fit."""
        name = self.mechanism.name
        if not isinstance(self.mechanism, DeclaredMechanism) or self.mechanism.can(Capability.CROSS):
            raise Incompatible(f"mechanism {name!r} does not say what it computes within one sequence", mechanism=name)
        if not self.mechanism.can(Capability.CAUSAL):
            raise Incompatible(f"mechanism {name!r} cannot be causal", mechanism=name)
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
        **words: Any,
    ) -> tuple[Tensor, None]:
        """Outputs [batch, query, heads, value_size] of `query` [batch, heads, query, key_size], `key` and `value`
        [batch, key_value_heads, key, size]; raises `Incompatible` for what the mechanism has no place for."""
        given = [word for word in REFUSED if words.get(word) is not None]
        if given:
            raise Incompatible(f"mechanism {self.mechanism.name!r} has no place for the model's {', '.join(given)}")
        causal = bool(words.get("is_causal", getattr(module, "is_causal", True)))
        window = words.get("sliding_window")
        if not self.mechanism.can(Capability.GROUPED):
            share = query.shape[1] // key.shape[1]
            key, value = (rows.repeat_interleave(share, dim=1) for rows in (key, value))
        places, keep = read_mask(attention_mask, causal=causal, window=window)
        heads = Heads(query=query.shape[1], key_value=key.shape[1], key_size=query.shape[3], value_size=value.shape[3])
        spec = _as_the_model_says(
            self._spec(heads, causal=causal), scaling, words.get("softcap"), window if causal else None
        )
        operands = Operands(
            query=query.transpose(1, 2),
            key=key.transpose(1, 2),
            value=value.transpose(1, 2),
            query_positions=places,
            key_positions=torch.arange(key.shape[2], device=key.device).expand(key.shape[0], -1),
            keep=keep,
            dropout=drawn_dropout(words.get("dropout") or 0.0),
        )
        flags = torch.is_grad_enabled(), operands.dropout is not None
        kernel = _kernel(spec, query.dtype, query.device.type, flags)
        return kernel.run(spec, operands), None

    def _spec_of(self, heads: Heads, *, causal: bool) -> AttentionSpec:
        config = configure(
            self.mechanism,
            self.options,
            width=heads.query * heads.key_size,
            heads=heads.query,
            key_value_heads=heads.key_value,
            head_size=heads.key_size,
            causal=causal,
        )
        name = self.mechanism.name
        if config.dropout:
            raise Incompatible(f"mechanism {name!r} is not asked for dropout here: the model's config says it")
        spec = self.mechanism.spec(config)
        if spec is None or spec.weights or spec.norm is not None or self._has_inner(config):
            raise Incompatible(
                f"mechanism {name!r} has learned weights of its own, which no model holds", mechanism=name
            )
        if spec.heads != heads:
            raise Incompatible(f"mechanism {name!r} has heads of its own, not the model's", mechanism=name)
        return dataclasses.replace(spec, rotary=None)

    def _has_inner(self, config: Any) -> bool:
        return isinstance(self.mechanism, DeclaredMechanism) and self.mechanism.inner(config) is not None


def _as_the_model_says(
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
    """Which weights a call drops, by a seed of torch's generator; None where none."""
    return Dropout(probability=probability, seed=int(torch.randint(SEEDS, ()))) if probability else None


@lru_cache(256)
def _kernel(spec: AttentionSpec, dtype: torch.dtype, device: str, flags: tuple[bool, bool]) -> Kernel:
    problem = attend_problem(
        spec,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        gradients=flags[0],
        dropout=flags[1],
        padded=True,
        placed=True,
        scattered=True,
        queries=0,
        keys=0,
    )
    return choose(installed().kernels, problem, None)
