"""A spec and operands for a problem."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core import (
    Additive,
    Alibi,
    AttentionSpec,
    Causal,
    Distribution,
    Full,
    General,
    Heads,
    Mask,
    Modifier,
    Operands,
    Predicate,
    Prefix,
    Problem,
    ScaledDot,
    Score,
    ScoreFunction,
    SoftCap,
    Softmax,
    Sparsemax,
    Window,
)
from torch import Tensor

SCORES: Mapping[str, Score] = {"scaled_dot": ScaledDot(), "general": General(), "additive": Additive(hidden=7)}
MODIFIERS: Mapping[str, Modifier] = {
    "alibi": Alibi(),
    "soft_cap": SoftCap(cap=2.0),
    "function": ScoreFunction(lambda score, head, query, key: score + 0.1 * (head + 1) * (key - query)),
}
MASKS: Mapping[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(left=2, right=1),
    "prefix": Prefix(3),
    "predicate": Predicate(lambda query, key: (query + key) % 3 != 1),
    "composite": (Causal() & Window(left=4)) | Prefix(2),
}
DISTRIBUTIONS: Mapping[str, Distribution] = {"softmax": Softmax(), "sparsemax": Sparsemax()}
BATCH = 2


def spec_of(problem: Problem) -> AttentionSpec:
    """A spec that has the problem's words."""
    groups = (0,) + (1,) * (problem.query_heads - 1) if problem.irregular_groups else None
    return AttentionSpec(
        heads=Heads(
            query=problem.query_heads,
            key_value=problem.key_value_heads,
            key_size=problem.key_size,
            value_size=problem.value_size,
            groups=groups,
        ),
        score=SCORES[problem.score],
        modifiers=tuple(MODIFIERS[kind] for kind in problem.modifiers),
        mask=MASKS[problem.mask],
        distribution=DISTRIBUTIONS[problem.distribution],
    )


def operands_of(problem: Problem) -> dict[str, Operands]:
    """Operands by name of their layout: as many queries as keys, fewer, and where padding is accepted, padded ones."""
    found = {"square": draw(problem, 7, 7), "fewer queries": draw(problem, 3, 9)}
    if problem.padded:
        keep = torch.ones(BATCH, 9, dtype=torch.bool)
        keep[0, 6:] = False
        keep[1] = False
        found["padded, one wholly"] = draw(problem, 9, 9, keep=keep)
        found["placed"] = draw(
            problem,
            3,
            9,
            query_positions=torch.tensor([[12, 13, 14], [4, 5, 6]]),
            key_positions=torch.stack([torch.arange(9).roll(4) + 6, torch.arange(9).flip(0)]),
            keep=torch.arange(9) < torch.tensor([[9], [7]]),
        )
    return found


def draw(problem: Problem, queries: int, keys: int, **located: Tensor) -> Operands:
    """Random operands, N(0, 1), in the problem's type; the same for the same sizes."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    dtype: torch.dtype = getattr(torch, problem.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.device, dtype)

    weights = SCORES[problem.score].weights(spec_of(problem).heads)
    return Operands(
        query=normal(BATCH, queries, problem.query_heads, problem.key_size),
        key=normal(BATCH, keys, problem.key_value_heads, problem.key_size),
        value=normal(BATCH, keys, problem.key_value_heads, problem.value_size),
        parameters={name: 0.3 * normal(*shape) for name, shape in weights.items()},
        **{name: tensor.to(problem.device) for name, tensor in located.items()},
    )


def tensors(operands: Operands) -> dict[str, Tensor]:
    """The tensors that gradients flow to, by name."""
    own = {"query": operands.query, "key": operands.key, "value": operands.value}
    return own | dict(operands.parameters)
