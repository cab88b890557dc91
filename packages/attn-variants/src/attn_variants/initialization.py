"""Initial values of the learned weights of the parts of a spec (score, modifiers, distribution, norm)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import cast

import torch
from attn_core import Heads
from attn_core.errors import InvalidValue
from attn_core.heads import Part
from attn_core.modifiers import ScoreFunction
from attn_core.norms import QkL2Norm
from attn_core.scores import Additive, Concat
from torch import Tensor, nn

from attn_variants.scores import init_additive, init_concat


class PartWeights(nn.Module):
    """The learned weights of one part, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            if hasattr(self, name):
                raise InvalidValue.of("parameters", name, "names that are not attributes of torch.nn.Module")
            self.register_parameter(name, nn.Parameter(tensor))

    def named(self) -> dict[str, Tensor]:
        """The weights by name."""
        return {name: getattr(self, name) for name in self.names}


def part_weights(part: Part | None, heads: Heads, *, without: str | None = None) -> PartWeights | None:
    """The learned weights of a part, initialised, except the one called `without`; None if it has none."""
    if part is None or not part.weights(heads):
        return None
    return PartWeights({name: weight for name, weight in init_weights(part, heads).items() if name != without})


def named_weights(parts: Mapping[str, nn.Module | None]) -> dict[str, Tensor]:
    """The weights of parts, named "part.weight", such as "score.bias"."""
    found = [(place, cast("PartWeights", part)) for place, part in parts.items() if part is not None]
    return {f"{place}.{name}": weight for place, part in found for name, weight in part.named().items()}


def init_weights(part: Part, heads: Heads) -> dict[str, Tensor]:
    """The initial weights of a part, by name."""
    if isinstance(part, Additive):
        return init_additive(part, heads)
    if isinstance(part, Concat):
        return init_concat(part, heads)
    if isinstance(part, QkL2Norm):
        return {"query_gain": torch.full((1,), math.log2(part.length**2 - part.length))}
    if isinstance(part, ScoreFunction):
        return {name: beginning(part, name, shape) for name, shape in part.weights(heads).items()}
    rule = INITIALIZERS.get(part.kind, normal)
    return {name: rule(shape, heads) for name, shape in part.weights(heads).items()}


def beginning(part: ScoreFunction, name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial values of one parameter of a score function: from its `initial`, else drawn from N(0, 0.02²)."""
    bounds = part.initial.get(name)
    if bounds is None:
        return torch.randn(shape) * 0.02
    low, high = bounds if isinstance(bounds, tuple) else (bounds, bounds)
    return torch.rand(shape) * (high - low) + low if low != high else torch.full(shape, float(low))


def normal(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Draw from N(0, 0.02²)."""
    return torch.randn(shape) * 0.02


def uniform(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Draw uniformly from ±0.1, as in the code of Luong et al. 2015."""
    return (torch.rand(shape) * 2 - 1) * 0.1


def zeros(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Zeros."""
    return torch.zeros(shape)


def ones(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Ones."""
    return torch.ones(shape)


def cosine_sharpness(shape: tuple[int, ...], heads: Heads) -> Tensor:
    """The b with softplus(b) = √d_k, so that scores have the variance of scaled dot products of random vectors."""
    beta = heads.key_size**0.5
    return torch.full(shape, beta + math.log1p(-math.exp(-beta)))


def glorot(shape: tuple[int, ...], heads: Heads) -> Tensor:  # noqa: ARG001 -- as all rules
    """Draw Glorot-uniform values, with fan-in and fan-out from the last two axes."""
    limit = math.sqrt(6 / (shape[-1] + shape[-2]))
    return (torch.rand(shape) * 2 - 1) * limit


INITIALIZERS: Mapping[str, Callable[[tuple[int, ...], Heads], Tensor]] = {
    "general": uniform,
    "location": uniform,
    "local_gaussian": uniform,
    "cosine": cosine_sharpness,
    "sink": zeros,
    "adaptive_entmax": zeros,
    "relative_keys": glorot,
    "relative_values": glorot,
    "dependency_keys": glorot,
    "dependency_values": glorot,
    "qk_norm": ones,
    "qk_norm_all_heads": ones,
}
"""The initialiser of each kind of part; `normal` for kinds that are not listed."""
