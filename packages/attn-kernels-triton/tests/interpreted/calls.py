"""Calls of attention, and what three computations make of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from attn_core import AttentionInputs, AttentionSpec, Heads, Mask
from attn_core.distributions import Distribution, Softmax
from attn_core.modifiers import Modifier
from attn_testing import oracle
from bounds import require_close, roundings_of
from torch import Tensor

Attend = Callable[[AttentionSpec, AttentionInputs], Tensor]


class Call(NamedTuple):
    """What is asked; sizes are of keys and values, heads of queries and of keys."""

    mask: Mask
    queries: int = 33
    keys: int = 70
    dtype: torch.dtype = torch.float32
    sizes: tuple[int, int] = (16, 16)
    heads: tuple[int, int] = (2, 1)
    modifiers: tuple[Modifier, ...] = ()
    distribution: Distribution = Softmax()
    batch: int = 1
    outliers: bool = False

    @property
    def spec(self) -> AttentionSpec:
        """The attention."""
        heads = Heads(query=self.heads[0], key_value=self.heads[1], key_size=self.sizes[0], value_size=self.sizes[1])
        return AttentionSpec(heads=heads, mask=self.mask, modifiers=self.modifiers, distribution=self.distribution)

    def operands(self, **more: Tensor) -> AttentionInputs:
        """Random operands, N(0, 1), some of them twenty times larger where outliers are wanted."""
        generator = torch.Generator().manual_seed(self.queries + 7 * self.keys)

        def normal(*shape: int) -> Tensor:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            far = torch.rand(*shape, generator=generator, dtype=torch.float64) < 0.01
            return torch.where(far & self.outliers, 20 * drawn, drawn).to(self.dtype)

        (query, shared), (key_size, value_size) = self.heads, self.sizes
        return AttentionInputs(
            query=normal(self.batch, self.queries, query, key_size),
            key=normal(self.batch, self.keys, shared, key_size),
            value=normal(self.batch, self.keys, shared, value_size),
            parameters={name: normal(*shape) for name, shape in self.spec.weights.items()},
            **more,
        )


def leaves(operands: AttentionInputs) -> dict[str, Tensor]:
    """What gradients flow to, by name."""
    return {"query": operands.query, "key": operands.key, "value": operands.value, **operands.parameters}


def with_leaves(operands: AttentionInputs, tensors: dict[str, Tensor]) -> AttentionInputs:
    """The operands with these tensors in place of `leaves`."""
    own = {name: tensors[name] for name in ("query", "key", "value")}
    return dataclasses.replace(operands, **own, parameters={name: tensors[name] for name in operands.parameters})


def wide(operands: AttentionInputs) -> AttentionInputs:
    """The operands in float64."""
    return with_leaves(operands, {name: tensor.double() for name, tensor in leaves(operands).items()})


def results(attend: Attend, spec: AttentionSpec, operands: AttentionInputs) -> dict[str, Tensor]:
    """The output, and the gradient to everything of a fixed weighted sum of it."""
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in leaves(operands).items()}
    out = attend(spec, with_leaves(operands, tensors))
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    found = torch.autograd.grad(out, list(tensors.values()), probe, materialize_grads=True)
    return {"output": out.detach(), **{f"gradient to {n}": g for n, g in zip(tensors, found, strict=True)}}


def require_right(attend: Attend, call: Call, operands: AttentionInputs | None = None) -> None:
    """Fail unless output and gradients are nearly as close to float64 as those of the plain computation."""
    operands = call.operands() if operands is None else operands
    exact = results(oracle.attend, call.spec, wide(operands))
    plain = results(oracle.attend, call.spec, operands)
    for name, found in results(attend, call.spec, operands).items():
        require_close(found, plain[name], exact[name], f"{call}: {name}", roundings_of(name))
