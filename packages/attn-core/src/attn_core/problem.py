"""A problem that a kernel may solve, as data in a closed vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation to compute. Every default is the plainest case; a kernel that does not mention a field
    accepts its default only, so what is added here later is refused until a kernel says otherwise."""

    operation: str = "attend"
    score: str = "scaled_dot"
    modifiers: tuple[str, ...] = ()
    mask: str = "full"
    distribution: str = "softmax"
    key_size: int = 0
    value_size: int = 0
    query_heads: int = 1
    key_value_heads: int = 1
    irregular_groups: bool = False
    padded: bool = False
    weights: bool = False
    gradients: bool = False
    dtype: str = "float32"
    device: str = "cpu"


def attend_problem(
    spec: AttentionSpec, *, dtype: str, device: str, gradients: bool, padded: bool, weights: bool = False
) -> Problem:
    """The problem of computing `spec` over given tensors.

    `padded` says that a key mask or explicit positions are given; `weights` that the weights are wanted too.
    """
    heads = spec.heads
    return Problem(
        score=spec.score.kind,
        modifiers=tuple(modifier.kind for modifier in spec.modifiers),
        mask=spec.mask.kind,
        distribution=spec.distribution.kind,
        key_size=heads.key_size,
        value_size=heads.value_size,
        query_heads=heads.query,
        key_value_heads=heads.key_value,
        irregular_groups=heads.per_group is None,
        padded=padded,
        weights=weights,
        gradients=gradients,
        dtype=dtype,
        device=device,
    )
