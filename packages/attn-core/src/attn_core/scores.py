"""Scoring functions e = f(q, k), as data; kernels get their learned parameters in `AttentionInputs.parameters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from attn_core.checks import require_choice
from attn_core.errors import InvalidValue
from attn_core.heads import Heads, Part


@dataclass(frozen=True, kw_only=True)
class Score(Part):
    """A scoring function. If it does not read keys (`reads_keys`), a layer neither projects nor caches keys.

    With `projects_keys`, keys are multiplied by the score's weight `key_weight`, independently of the query. A layer
    does so once per token and caches the result, of shape `key_shape`; `AttentionInputs.key` holds these projected keys
    if its parameters have no `score.key_weight`, and the plain keys if they do.
    """

    equation: ClassVar[str]
    reads_keys: ClassVar[bool] = True
    projects_keys: ClassVar[bool] = False

    def key_shape(self, heads: Heads) -> tuple[int, int]:
        """The shape (heads, elements) of what is cached of one token's key."""
        return heads.key_value, heads.key_size

    def pair_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size


@dataclass(frozen=True, kw_only=True)
class ScaledDot(Score):
    """q·k / √d_k (Vaswani et al. 2017). `scale` replaces 1/√d_k."""

    scale: float | None = None
    kind = "scaled_dot"
    equation = r"q^\top k / \sqrt{d_k}"


@dataclass(frozen=True, kw_only=True)
class Dot(Score):
    """q·k, not scaled (Luong et al. 2015, arXiv 1508.04025; T5, arXiv 1910.10683)."""

    kind = "dot"
    equation = r"q^\top k"


@dataclass(frozen=True, kw_only=True)
class General(Score):
    """qᵀ W k with one learned W [key_size, key_size] per query head (Luong et al. 2015, arXiv 1508.04025).

    `weight` is [heads, key_size, key_size].
    """

    kind = "general"
    equation = r"q^\top W k"

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size**2

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (heads.query, heads.key_size, heads.key_size)}


@dataclass(frozen=True, kw_only=True)
class Cosine(Score):
    """β q·k / (‖q‖‖k‖ + ε) with a learned β > 0 per head (content addressing, Graves et al. 2014, arXiv 1410.5401).

    β = softplus(`sharpness`), `sharpness` [heads]; a number for `beta` replaces it, and 1 leaves the cosine alone.
    `eps` keeps vectors of length zero at score zero.
    """

    eps: float = 1e-8
    beta: float | None = None
    kind = "cosine"
    equation = r"\beta\, q^\top k / (\lVert q \rVert \lVert k \rVert + \epsilon)"

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"sharpness": (heads.query,)} if self.beta is None else {}


ACTIVATIONS = ("tanh", "relu")
"""The activations of the hidden units of additive and concat scores."""


@dataclass(frozen=True, kw_only=True)
class _Network(Score):
    """A network with one hidden layer of `intermediate_size` units, by default the key size, for each query head:
    `query_weight` [heads, key_size, units], `key_weight` [heads of `key_shape`, key_size, units], `bias` and `vector`
    [heads, units]. `activation` is "tanh" or "relu"."""

    intermediate_size: int | None = None
    activation: str = "tanh"
    projects_keys = True

    def __post_init__(self) -> None:
        require_choice(f"{self.kind}.activation", self.activation, ACTIVATIONS)

    def key_shape(self, heads: Heads) -> tuple[int, int]:
        return heads.key_value, self.units(heads)

    def units(self, heads: Heads) -> int:
        """Hidden units of one head."""
        return self.intermediate_size or heads.key_size

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * heads.key_size * self.units(heads)

    def key_flops(self, heads: Heads) -> int:
        return 2 * self.key_shape(heads)[0] * heads.key_size * self.units(heads)

    def pair_flops(self, heads: Heads) -> int:
        return 2 * heads.query * self.units(heads)

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        units = self.units(heads)
        return {
            "query_weight": (heads.query, heads.key_size, units),
            "key_weight": (self.key_shape(heads)[0], heads.key_size, units),
            "bias": (heads.query, units),
            "vector": (heads.query, units),
        }


@dataclass(frozen=True, kw_only=True)
class Additive(_Network):
    """vᵀ tanh(W_q q + W_k k + b) (Bahdanau et al. 2015, arXiv 1409.0473), with W_k once per key/value head."""

    kind = "additive"
    equation = r"v^\top \tanh(W_q q + W_k k + b)"


@dataclass(frozen=True, kw_only=True)
class Concat(_Network):
    """vᵀ tanh(W [k; q] + b) (Luong et al. 2015, arXiv 1508.04025), the additive score with W = [W_k | W_q] per query
    head, so that heads of a group share no part of W."""

    kind = "concat"
    equation = r"v^\top \tanh(W [k; q] + b)"

    def key_shape(self, heads: Heads) -> tuple[int, int]:
        return heads.query, self.units(heads)


@dataclass(frozen=True, kw_only=True)
class Location(Score):
    """e_j = (W q)_j, independent of the content of key j (Luong et al. 2015, arXiv 1508.04025, location-based).

    `longest` is the largest number of keys; computing a key at a position from `longest` on raises an error.
    `weight` is [heads, longest, key_size].
    """

    longest: int
    kind = "location"
    equation = r"(W q)_j"
    reads_keys = False

    def __post_init__(self) -> None:
        if self.longest < 1:
            raise InvalidValue.of("location.longest", self.longest, "a whole number of keys from 1")

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (heads.query, self.longest, heads.key_size)}
