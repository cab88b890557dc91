"""Makes a spec and random operands for a kernel's problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Mask, Window
from attn_core.distributions import (
    AdaptiveEntmax,
    Distribution,
    Entmax,
    Hard,
    LocalGaussian,
    Sigmoid,
    Softmax,
    SoftmaxOne,
    SoftmaxWithSink,
    Sparsemax,
    StickBreaking,
)
from attn_core.kernels.attend import AttendProblem
from attn_core.masks import (
    BigBird,
    BlockSparse,
    Chunked,
    ChunkRing,
    Dense,
    Fixed,
    GlobalTokens,
    Graph,
    Neighbourhood,
    PerHead,
    Predicate,
    Prefix,
    Segments,
    Strided,
    Tree,
)
from attn_core.modifiers import (
    Alibi,
    DependencyKeys,
    DependencyTree,
    DependencyValues,
    Modifier,
    RelativeBias,
    RelativeKeys,
    RelativeValues,
    ScoreFunction,
    SoftCap,
    T5Bias,
)
from attn_core.scores import Additive, Concat, Cosine, Dot, General, Location, ScaledDot, Score
from torch import Tensor

SCORES: Mapping[str, Score] = {
    "scaled_dot": ScaledDot(),
    "dot": Dot(),
    "general": General(),
    "cosine": Cosine(),
    "additive": Additive(intermediate_size=7),
    "concat": Concat(intermediate_size=6),
    "location": Location(longest=140),
}
SENTENCE = DependencyTree((1, -1, 4, 4, 1, 4))
"""A dependency tree of six words, of which the second is the root."""
MODIFIERS: Mapping[str, Modifier] = {
    "alibi": Alibi(),
    "soft_cap": SoftCap(cap=2.0),
    "function": ScoreFunction(
        lambda score, head, query, key, slope: score + 0.1 * (head + 1 + slope[head]) * (key - query),
        parameters={"slope": ("heads",)},
    ),
    "t5_bias": T5Bias(buckets=8, max_distance=20, bidirectional=True),
    "relative_bias": RelativeBias(clip=3),
    "relative_keys": RelativeKeys(clip=2),
    "relative_values": RelativeValues(clip=4, share=True),
    "dependency_keys": DependencyKeys(clip=3, tree=SENTENCE),
    "dependency_values": DependencyValues(clip=2, tree=SENTENCE),
}
MASKS: Mapping[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(left=2, right=1),
    "prefix": Prefix(3),
    "predicate": Predicate(lambda query, key: (query + key) % 3 != 1),
    "composite": (Causal() & Window(left=4)) | Prefix(2),
    "global": GlobalTokens((0, 5)),
    "strided": Strided(3),
    "fixed": Fixed(block=4, summaries=1),
    "blocks": BlockSparse(4, ((0, 2), (), (1, 2), (0, 1))),
    "neighbourhood": Neighbourhood(size=3, dilation=2),
    "segments": Segments((3, 1, 4)),
    "chunked": Chunked(size=3, back=1),
    "chunk_ring": ChunkRing(size=3),
    "tree": Tree((-1, 0, 0, 2), context=3),
    "graph": Graph.of(9, [(1, 0), (1, 8), (6, 2), (8, 8)]),
    "dense": Dense.of([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]),
}
HEAD_MASKS = frozenset({"per_head", "big_bird"})
"""Kinds of masks that differ by head."""
LENGTH_MASKS = frozenset({"neighbourhood", "big_bird", "chunk_ring"})
"""Kinds of masks that depend on the number of keys."""
MASK_KINDS = (*MASKS, *sorted(HEAD_MASKS))
DISTRIBUTIONS: Mapping[str, Distribution] = {
    "softmax": Softmax(),
    "softmax_one": SoftmaxOne(),
    "sink": SoftmaxWithSink(),
    "sigmoid": Sigmoid(),
    "sparsemax": Sparsemax(),
    "entmax": Entmax(),
    "adaptive_entmax": AdaptiveEntmax(),
    "hard": Hard(),
    "local_gaussian": LocalGaussian(radius=3),
    "stick_breaking": StickBreaking(),
}
BATCH = 2


def spec_of(problem: AttendProblem) -> AttentionSpec:
    """An attention spec with the parts that the problem names."""
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
        mask=mask_of(problem),
        distribution=DISTRIBUTIONS[problem.distribution],
    )


def mask_of(problem: AttendProblem) -> Mask:
    """A mask of the problem's kind, for its heads."""
    if problem.mask == "per_head":
        return PerHead(tuple(Window(left=1 + head, dilation=1 + head % 2) for head in range(problem.query_heads)))
    if problem.mask == "big_bird":
        return BigBird(block=1, random=1, number_of_heads=problem.query_heads)
    return MASKS[problem.mask]


def operands_of(problem: AttendProblem) -> dict[str, AttentionInputs]:
    """Inputs by the name of their layout: as many queries as keys, fewer queries, many of both and, if the problem
    allows them, padding and explicit positions.
    """
    found = {"square": draw(problem, 7, 7), "fewer queries": draw(problem, 3, 9), "many": draw(problem, 70, 137)}
    if problem.padded:
        key_padding_mask = torch.ones(BATCH, 9, dtype=torch.bool)
        key_padding_mask[0, 6:] = False
        key_padding_mask[1] = False
        found["padded, one wholly"] = draw(problem, 9, 9, key_padding_mask=key_padding_mask)
    key_padding_mask, places = torch.arange(9) < torch.tensor([[9], [7]]), torch.tensor([[12, 13, 14], [4, 5, 6]])
    if problem.has_positions:
        found["has_positions"] = draw(problem, 3, 9, query_positions=places - 4, key_padding_mask=key_padding_mask)
        found["counted from the first"] = draw(problem, 70, 137, query_positions=torch.arange(70)[None])
    if problem.kv_unordered:
        keys = torch.stack([torch.arange(9).roll(4) + 6, torch.arange(9).flip(0)])
        found["kv_unordered"] = draw(
            problem, 3, 9, query_positions=places, key_positions=keys, key_padding_mask=key_padding_mask
        )
    return found


def draw(problem: AttendProblem, queries: int, keys: int, **located: Tensor) -> AttentionInputs:
    """Random operands, N(0, 1), in the problem's dtype; equal for equal sizes."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    dtype: torch.dtype = getattr(torch, problem.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.device, dtype)

    operands = AttentionInputs(
        query=normal(BATCH, queries, problem.query_heads, problem.key_size),
        key=normal(BATCH, keys, problem.key_value_heads, problem.key_size),
        value=normal(BATCH, keys, problem.key_value_heads, problem.value_size),
        parameters={name: 0.3 * normal(*shape) for name, shape in spec_of(problem).weights.items()},
    )
    there: dict[str, Any] = {name: tensor.to(problem.device) for name, tensor in located.items()}
    return dataclasses.replace(operands, **there)


def tensors(operands: AttentionInputs) -> dict[str, Tensor]:
    """The tensors with gradients, by name: query, key, value and parameters."""
    own = {"query": operands.query, "key": operands.key, "value": operands.value}
    return own | dict(operands.parameters)
