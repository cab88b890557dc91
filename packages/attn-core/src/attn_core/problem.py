"""A problem that a kernel may solve, as data in a closed vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.mask.density import density
from attn_core.mask.mask import Mask
from attn_core.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One operation to compute. Every default is the plainest case; a kernel that does not mention a field
    accepts its default only, so what is added here later is refused until a kernel says otherwise.

    `queries`, `keys`, `density` and `reach` are the exception: they change what a call costs, never what it means, so a
    kernel that does not mention them accepts them all. `density` is the share of all pairs that is left to a kernel
    which skips, for every `TILE` neighbouring queries, the keys that none of them may see. `reach` is the number of
    neighbouring positions that hold all that a query can see. Unknown, they are 0, 0, 1 and 0.

    `placed` says that positions are given, `scattered` that those of the keys are: they may stand in any order.

    `packed` says that rows hold several texts, see `Packed`; whoever finds no kernel for that computes text by text.
    `dropout` says that weights are dropped at random, see `Dropout`.

    Of `attend_paged`, see `paged_problem`, `rows` says how a cache keeps the rows that are met. Of `chosen`, see
    `chosen_problem`, sizes say what there is to know. Of `recurrence`, see `recurrence_problem`, `decay` says what
    fades, `corrects` that keys write by the delta rule. Of operations on rows, see `row_problem`, `width` is the number
    of elements, `form` which of its forms.
    """

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
    head_masks: bool = False
    length_bound: bool = False
    padded: bool = False
    placed: bool = False
    scattered: bool = False
    packed: bool = False
    dropout: bool = False
    weights: bool = False
    gradients: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    rows: str = "plain"
    decay: str = "none"
    corrects: bool = False
    width: int = 0
    form: str = "plain"
    queries: int = 0
    keys: int = 0
    density: float = 1.0
    reach: int = 0


TILE = 64
"""Queries that a kernel which skips keys takes together, for `Problem.density`."""

PRICED = frozenset({"queries", "keys", "density", "reach"})
"""Fields that only inform prices."""


def attend_problem(
    spec: AttentionSpec, *, dtype: str, device: str, gradients: bool, padded: bool, **known: bool | int
) -> Problem:
    """The problem of computing `spec` over given tensors.

    `padded` says that a key mask or explicit positions are given. Known may be: `placed`, that positions are explicit,
    and `scattered`, that those of keys are; `packed`, that rows hold several texts; `dropout`, that weights are
    dropped; `weights`, that they are wanted too; `queries` and `keys`, the lengths.
    """
    heads, queries, keys = spec.heads, int(known.get("queries", 0)), int(known.get("keys", 0))
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
        head_masks=spec.mask.heads is not None,
        length_bound=spec.mask.by_length,
        padded=padded,
        placed=bool(known.get("placed")),
        scattered=bool(known.get("scattered")),
        packed=bool(known.get("packed")),
        dropout=bool(known.get("dropout")),
        weights=bool(known.get("weights")),
        gradients=gradients,
        dtype=dtype,
        device=device,
        queries=queries,
        keys=keys,
        density=density(spec.mask, queries, keys, TILE) if queries and keys else 1.0,
        reach=reach_of(spec.mask),
    )


def reach_of(mask: Mask) -> int:
    """How many neighbouring positions hold all that a query can see; 0 where there is no bound."""
    if mask.lookback is None or mask.lookahead is None:
        return 0
    return mask.lookback + mask.lookahead + 1
