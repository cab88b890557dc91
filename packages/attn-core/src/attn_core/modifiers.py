"""Changes to the scores before the distribution, and to the values that are summed, as data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from attn_core.checks import is_number, is_whole, keep_tuples, require_no_module
from attn_core.errors import InvalidValue, UnknownName
from attn_core.heads import HeadRange, Heads, Part

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, kw_only=True)
class Modifier(Part):
    """A change to the scores before the distribution, or to the values that are summed.

    `located` says that the change depends on the positions of queries and keys, `relative` that it depends on them
    through their distance only, `scores_keys` that it multiplies queries by something else than keys.
    """

    located: ClassVar[bool] = True
    scores_keys: ClassVar[bool] = False

    @property
    def relative(self) -> bool:
        """Whether positions matter through their distance only; a function is taken to do so."""
        return True


@dataclass(frozen=True, kw_only=True)
class Alibi(Modifier):
    """Adds -m_h |i - j| with the slopes m_h = 2^(-8h/H) (Press et al. 2022, arXiv 2108.12409).

    `heads_of` gives the range of these heads in a layer that is split over ranks.
    """

    heads_of: HeadRange | None = None
    kind = "alibi"

    def slopes(self, heads: int) -> list[float]:
        """The slopes m_h of `heads` heads: of h = 1..H, or of those from `heads_of.first` on among `heads_of.total`.

        Where H is not a power of two, the slopes for the next lower power come first, then every other slope for the
        next higher one.
        """
        if self.heads_of is not None:
            first = self.heads_of.first
            return Alibi().slopes(self.heads_of.total)[first : first + heads]
        power = 1 << (heads.bit_length() - 1)
        slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
        between = [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * power, 2)]
        return slopes + between[: heads - power]


@dataclass(frozen=True, kw_only=True)
class SoftCap(Modifier):
    """c tanh(e / c) before the mask (Gemma 2, arXiv 2408.00118)."""

    cap: float
    kind = "soft_cap"
    located = False

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise InvalidValue.of("soft_cap.cap", self.cap, "a number above 0")


@dataclass(frozen=True)
class ScoreFunction(Modifier):
    """A change of the scores given as a function: FlexAttention's `score_mod` without the batch index, with learned
    `parameters`.

    `function(score, head, query, key, **parameters)` gets scores [batch, heads, query, key] and integer tensors that
    broadcast with them (head index, absolute query and key positions), and returns the scores to use instead.

    `parameters` maps names to shapes, such as `{"slope": ("heads",)}`, made of numbers and of the words "heads" (query
    heads), "kv_heads" (key/value heads) and "head_dim" (size of keys). The layer creates, trains and saves a
    `torch.nn.Parameter` for each, and passes it to the function by keyword: `slope[head]` is then the slope of each
    score's head. `initial` sets initial values by name: a number for all elements, or two numbers between which they
    are drawn uniformly; parameters that it does not name are drawn from N(0, 0.02²).

    Raises `InvalidValue` for parameters that the function does not take, invalid shapes, and a function that
    holds a `torch.nn.Module` or `torch.nn.Parameter`, which no layer would register, train or save; `UnknownName` for
    an initial value of no parameter.
    """

    function: Callable[..., Any]
    parameters: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict, hash=False)
    initial: Mapping[str, float | tuple[float, float]] = field(default_factory=dict, hash=False)
    kind = "function"
    splits_heads = False

    def __post_init__(self) -> None:
        require_no_module("score_function.function", self.function)
        for name, shape in self.parameters.items():
            given: object = shape
            if not isinstance(given, tuple) or not all(is_axis(axis) for axis in given):
                allowed = f"a tuple of whole numbers from 1 and of {', '.join(map(repr, AXES))}"
                raise InvalidValue.of(f"score_function.parameters[{name!r}]", shape, allowed)
        for name, value in self.initial.items():
            if name not in self.parameters:
                raise UnknownName.of("parameter of a ScoreFunction", name, self.parameters)
            ends: tuple[object, ...] = value if isinstance(value, tuple) else (value, value)
            if len(ends) != 2 or not all(is_number(end) for end in ends):
                raise InvalidValue.of(f"score_function.initial[{name!r}]", value, "a finite number, or two of them")
        self._check_arguments()

    def _check_arguments(self) -> None:
        try:
            signature = inspect.signature(self.function)
        except (TypeError, ValueError):  # a function written in C, which has no signature
            return
        try:
            signature.bind(*"shqk", **dict.fromkeys(self.parameters))
        except TypeError as error:
            allowed = ", ".join(("one that takes (score, head, query, key", *self.parameters)) + f"): {error}"
            raise InvalidValue.of("score_function.function", f"function{signature}", allowed) from error

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        sizes = {axis: getattr(heads, field) for axis, field in AXES.items()}
        return {
            name: tuple(axis if isinstance(axis, int) else sizes[axis] for axis in shape)
            for name, shape in self.parameters.items()
        }


AXES: Mapping[str, str] = {"heads": "query", "kv_heads": "key_value", "head_dim": "key_size"}
"""Words for axis lengths of learned parameters, and the fields of `Heads` that they stand for."""


def is_axis(axis: object) -> bool:
    """Whether this is a valid axis length, or a word of `AXES`."""
    return axis in AXES if isinstance(axis, str) else is_whole(axis) and axis > 0


@dataclass(frozen=True, kw_only=True)
class BiasTable(Modifier):
    """Adds a learned bias per head and bucket of distances: `table` [buckets, heads]."""

    def rows(self) -> int:
        """Number of buckets."""
        raise TypeError(f"{type(self).__name__} does not implement rows(), the number of buckets")

    @property
    def far(self) -> int:
        """The distance from which on all distances in one direction share a bucket."""
        raise TypeError(f"{type(self).__name__} does not implement far, the distance from which on buckets are shared")

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket, int64, of each distance, key position minus query position; uses only operators of tensors."""
        raise TypeError(f"{type(self).__name__} does not implement bucket(), called for the distance {distance}")

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"table": (self.rows(), heads.query)}


@dataclass(frozen=True, kw_only=True)
class T5Bias(BiasTable):
    """One bucket per near distance, then buckets of logarithmic width up to `max_distance` (T5, arXiv 1910.10683).

    `bidirectional` gives half of the `buckets` to keys after the query; otherwise these keys share the bucket of
    distance zero.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = False
    kind = "t5_bias"

    def __post_init__(self) -> None:
        least = 4 if self.bidirectional else 2
        if self.buckets < least or self.buckets % (2 if self.bidirectional else 1):
            even = "an even number" if self.bidirectional else "a whole number"
            raise InvalidValue.of("t5_bias.buckets", self.buckets, f"{even} from {least}")
        if self.max_distance <= self.one_by_one:
            allowed = f"more than the {self.one_by_one} distances that have buckets of their own"
            raise InvalidValue.of("t5_bias.max_distance", self.max_distance, allowed)

    @property
    def one_side(self) -> int:
        """Number of buckets of one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    @property
    def one_by_one(self) -> int:
        """Number of distances, counted from 0, that have a bucket of their own."""
        return self.one_side // 2

    def rows(self) -> int:
        return self.buckets

    @property
    def far(self) -> int:
        # The start of the last bucket is subject to rounding; one position further is certainly within it.
        return self.max_distance + 1

    def bucket(self, distance: Tensor) -> Tensor:
        side = (distance > 0) * self.one_side if self.bidirectional else 0
        magnitude = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        near = self.one_by_one
        # In float32, as checkpoints were trained: a distance on the edge of two buckets must fall on the same side.
        log_fraction = (magnitude.clamp(min=1).float() / near).log() / math.log(self.max_distance / near)
        far_bucket = (near + (log_fraction * (self.one_side - near)).long()).clamp(max=self.one_side - 1)
        found: Tensor = side + magnitude.where(magnitude < near, far_bucket)
        return found


@dataclass(frozen=True, kw_only=True)
class RelativeBias(BiasTable):
    """One bucket per distance j - i, clipped to [-clip, clip]: 2 clip + 1 in all."""

    clip: int
    kind = "relative_bias"

    def __post_init__(self) -> None:
        check_clip(self.kind, self.clip)

    def rows(self) -> int:
        return 2 * self.clip + 1

    @property
    def far(self) -> int:
        return self.clip

    def bucket(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.clip, self.clip) + self.clip


@dataclass(frozen=True, kw_only=True)
class RelativeVectors(Modifier):
    """A learned vector per distance j - i, clipped to [-clip, clip] (Shaw et al. 2018, arXiv 1803.02155).

    `table` [heads, 2 clip + 1, size], or [1, 2 clip + 1, size] where heads `share` one.
    """

    clip: int
    share: bool = False

    def __post_init__(self) -> None:
        check_clip(self.kind, self.clip)

    def size(self, heads: Heads) -> int:
        """Length of the vectors."""
        raise TypeError(f"{type(self).__name__} does not implement size(), the length of its vectors")

    def query_flops(self, heads: Heads) -> int:
        return 2 * heads.query * (2 * self.clip + 1) * self.size(heads)

    def weights(self, heads: Heads) -> Mapping[str, tuple[int, ...]]:
        return {"table": (1 if self.share else heads.query, 2 * self.clip + 1, self.size(heads))}


@dataclass(frozen=True, kw_only=True)
class RelativeKeys(RelativeVectors):
    """Adds q·a_{j-i} / √d_k: the vector is added to the key before the scaled product (Shaw et al. 2018)."""

    kind = "relative_keys"
    scores_keys = True

    def size(self, heads: Heads) -> int:
        return heads.key_size


@dataclass(frozen=True, kw_only=True)
class RelativeValues(RelativeVectors):
    """The output is Σ α_ij (v_j + a_{j-i}): the scores are left as they are (Shaw et al. 2018)."""

    kind = "relative_values"

    def size(self, heads: Heads) -> int:
        return heads.value_size


def check_clip(kind: str, clip: object) -> None:
    """Raise `InvalidValue` unless `clip` is a whole number from 0."""
    if not isinstance(clip, int) or clip < 0:
        raise InvalidValue.of(f"{kind}.clip", clip, "a whole number of positions from 0")


@dataclass(frozen=True)
class DependencyTree:
    """A dependency parse: `heads[i]` is the token that token i depends on, -1 for the root, of which there is one.

    Each token after the parse depends on the token before it, so that without a parse, (), a sequence is a chain.
    Raises `InvalidValue` for heads that are not tokens, for several roots, and for a cycle, whose tokens it names.
    """

    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        keep_tuples(self, "heads")
        tokens = len(self.heads)
        for token, head in enumerate(self.heads):
            if type(head) is not int or not -1 <= head < tokens:
                raise InvalidValue.of(f"heads[{token}]", head, f"a token from 0 to {tokens - 1}, or -1 for the root")
        roots = [token for token, head in enumerate(self.heads) if head < 0]
        if len(roots) > 1:
            raise InvalidValue.of("heads", f"the roots {roots}", "one root, -1, for each sentence")
        self._check_cycles()

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of steps from each token up to the root; 0 for the root."""
        found: list[int] = [-1] * len(self.heads)
        for token in range(len(self.heads)):
            path = [token]
            while found[path[-1]] < 0 <= self.heads[path[-1]]:
                path.append(self.heads[path[-1]])
            top = max(found[path[-1]], 0)
            for above, node in enumerate(reversed(path)):
                found[node] = top + above
        return tuple(found)

    @property
    def ancestors(self) -> tuple[tuple[bool, ...], ...]:
        """Row i, column j: whether token j is token i or one of its ancestors."""
        rows = []
        for token in range(len(self.heads)):
            row, node = [False] * len(self.heads), token
            while node >= 0:
                row[node], node = True, self.heads[node]
            rows.append(tuple(row))
        return tuple(rows)

    def _check_cycles(self) -> None:
        done: set[int] = set()
        for token in range(len(self.heads)):
            path: dict[int, None] = {}
            node = token
            while node >= 0 and node not in done:
                if node in path:
                    cycle = [*list(path)[list(path).index(node) :], node]
                    raise InvalidValue.of("heads", "the cycle " + " -> ".join(map(str, cycle)), "a tree")
                path[node] = None
                node = self.heads[node]
            done.update(path)


@dataclass(frozen=True, kw_only=True)
class DependencyKeys(RelativeKeys):
    """`RelativeKeys` over distances in a tree instead of the sequence (Wang et al. 2019, arXiv 1909.00383).

    Where one token is an ancestor of the other, the distance is the query's depth minus the key's depth; otherwise it
    is the sum of both depths, negative where the query comes later in the sequence.
    """

    tree: DependencyTree
    kind = "dependency_keys"

    @property
    def relative(self) -> bool:
        """Whether the tree is a chain: a parse counts positions from the start of the sequence."""
        return not self.tree.heads


@dataclass(frozen=True, kw_only=True)
class DependencyValues(RelativeValues):
    """`RelativeValues` over the distances of `DependencyKeys`."""

    tree: DependencyTree
    kind = "dependency_values"

    @property
    def relative(self) -> bool:
        """Whether the tree is a chain: a parse counts positions from the start of the sequence."""
        return not self.tree.heads
